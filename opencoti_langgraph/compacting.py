"""Compaction by re-rooting: the rewritten context becomes a new branch of the stable ancestor, and the old branch goes.

Law: no I/O; the steps yield calls, and a client sends them. The order is fork, then swap, then release: a crash between any two
leaves a pool that its lease cleans up, never a caller with the name of a dead pool.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from opencoti_langgraph import calls
from opencoti_langgraph.calls import Call
from opencoti_langgraph.errors import PoolConflictError, PoolNotFoundError
from opencoti_langgraph.results import Pool, PoolRef

GRACE_S = 60.0
"""How long the old subtree may live on unused, where nobody releases it."""


@dataclass(frozen=True, slots=True)
class Refork:
    """What came of it: the new pool, the old one's id (None: it was gone before), and the pools that are gone by now."""

    pool: Pool
    old_id: int | None
    released: tuple[int, ...]


def refork(old: PoolRef, new: Mapping[str, Any], *, release: bool) -> Generator[Call[Any], Any, Refork]:
    """Put a rewritten prefix in the place of `old`. A root has no ancestor: the new pool is then a root too."""
    body = dict(new)
    grace_s, ancestor = body.pop("grace_s", GRACE_S), body.pop("ancestor", None)
    if "compacted_tokens" in body:
        body["tokens"] = body.pop("compacted_tokens")
    try:
        facts: Pool | None = yield calls.pool(old, depth=0)
    except PoolNotFoundError:
        if ancestor is None:
            raise
        facts = None  # an earlier try got so far: a node that runs again
    above = facts.parent if facts is not None and ancestor is None else ancestor
    pool: Pool = yield calls.create_pool(**body) if above is None else calls.fork_pool(above, **body)
    released: list[int] = []
    if facts is None or facts.pool_id == pool.pool_id:
        return Refork(pool, None, ())
    with suppress(PoolNotFoundError, PoolConflictError):
        yield calls.renew_pool(facts.pool_id, ttl_s=grace_s)
        if release:
            gone = yield calls.release_pool(facts.pool_id, recursive=True)
            released = gone.released_pools or [facts.pool_id]
    return Refork(pool, facts.pool_id, tuple(released))
