"""How a request that names a pool is served: attach, wait, or go unshared and say why.

Law: decides from records alone. A refusal is an ApiError; everything else is an Attachment, and "unshared" always has a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from polykv_proxy.core.pools import Pool, PoolTree, Residency, SeqRef
from polykv_proxy.core.prefix import Tokens, common_prefix
from polykv_proxy.errors import ApiError


class PoolSource(StrEnum):
    """Where a request named its pool. The first two insist on it; the others are served without when it is not there."""

    BODY = "pool_id"
    HEADER = "x-pool-id"
    LEGACY = "shared_pool_slot"
    MODEL = "model"
    DEFAULT = "default"


INSISTING = frozenset({PoolSource.BODY, PoolSource.HEADER})


class Miss(StrEnum):
    """Why nothing was shared, where the proxy is the one who knows. The engine has more of them."""

    STALE_SEQ = "stale_seq"
    REBUILD_FAILED = "rebuild_failed"
    NO_SEQ_IDS = "no_seq_ids"


class Course(StrEnum):
    """What to do with the request."""

    PLAIN = "plain"
    ATTACH = "attach"
    WAIT = "wait"
    REBUILD = "rebuild"
    UNSHARED = "unshared"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asked for. `n_tasks`: how many tasks the engine will make of it; `max_tokens`: of each answer, None without.

    `overcommit`: it starts whatever an admission policy says. `stream`: it wants its answer as an event stream.
    `request_id`: the caller's name for it.
    """

    pool: str | int | None = None
    source: PoolSource = PoolSource.BODY
    explicit_p: int | None = None
    session_id: str | None = None
    n_tasks: int = 1
    max_tokens: int | None = None
    overcommit: bool = False
    stream: bool = False
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Attachment:
    """The course of a request. `pool` is set unless plain or unknown; `seq` and `max_shared` on attach; `miss` when unshared."""

    course: Course
    pool: Pool | None = None
    seq: SeqRef | None = None
    max_shared: int = 0
    miss: Miss | None = None


PLAIN = Attachment(Course.PLAIN)


def decide_attach(tree: PoolTree, wish: Wish) -> Attachment:
    """The course of a request.

    1. names no pool: plain
    2. the pool is unknown: 404 when insisted upon, a reason for the legacy field, else plain
    3. the pool is being released: 409 when insisted upon, else as unknown
    4. resident: attach
    5. materializing: wait for it
    6. saved, evicted, lost, quarantined, or failed for the time being: rebuild
    7. failed for good: unshared
    """
    if wish.pool is None:
        return PLAIN
    pool = tree.find(wish.pool)
    if pool is None:
        return _absent(wish, "pool_not_found", f"there is no pool {wish.pool!r}; GET /polykv/pools lists those there are")
    if pool.residency is Residency.RELEASING:
        return _absent(wish, "pool_releasing", f"pool {wish.pool!r} is being released and takes no new requests")
    if pool.residency is Residency.RESIDENT:
        assert pool.seq is not None
        limit = pool.prefix_len if wish.explicit_p is None else min(wish.explicit_p, pool.prefix_len)
        return Attachment(Course.ATTACH, pool, pool.seq, limit)
    return _without_kv(pool)


def _without_kv(pool: Pool) -> Attachment:
    if pool.residency is Residency.MATERIALIZING:
        return Attachment(Course.WAIT, pool)
    if pool.rebuildable:
        return Attachment(Course.REBUILD, pool)
    return Attachment(Course.UNSHARED, pool, miss=Miss.REBUILD_FAILED)


def _absent(wish: Wish, code: str, message: str) -> Attachment:
    if wish.source in INSISTING:
        raise ApiError(code, message, param=wish.source.value)
    return Attachment(Course.UNSHARED, miss=Miss.STALE_SEQ) if wish.source is PoolSource.LEGACY else PLAIN


def check_explicit_prefix(pool: Pool, wanted: int, prompt: Tokens) -> None:
    """An explicit P must be a common prefix of pool and prompt, token by token. ApiError 409 names the first differing position."""
    shared = common_prefix(pool.tokens, prompt)
    if wanted <= shared:
        return
    ends = {pool.prefix_len: "the pool ends there", int(prompt.size): "the prompt ends there"}
    why = ends.get(shared, "the tokens differ there")
    raise ApiError(
        "prefix_mismatch",
        f"shared_prefix_n_tokens is {wanted}, but prompt and pool {pool.pool_id} agree only up to position {shared}: {why}; "
        "leave the field out to share as much as agrees",
        param="shared_prefix_n_tokens",
        extra={"first_differing_position": shared, "pool_prefix_len": pool.prefix_len, "prompt_len": int(prompt.size)},
    )
