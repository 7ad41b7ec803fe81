"""What our routes answer, as types: for the document at `/polykv/openapi.json` and for whoever checks answers against it.

Law: shapes only, under the names of docs/http-api.md; routes make their answers themselves. More fields may come beside these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polykv_proxy.core.admission.capacity import Capacity
from polykv_proxy.core.admission.policy import Policy
from polykv_proxy.runtime.rows import PeerRow, PoolRow, SessionRow, Whole


@dataclass(frozen=True)
class Fault:
    """The object of an error."""

    message: str
    type: str
    code: str
    param: str | None


@dataclass(frozen=True)
class Failed:
    """Every error of ours."""

    error: Fault


@dataclass(frozen=True)
class PoolTree(PoolRow):
    """A pool, and those below it, parents first."""

    subtree: Sequence[PoolRow]


@dataclass(frozen=True)
class PoolList:
    """All pools by id."""

    pools: Sequence[PoolRow]
    tree_depth: int
    seq_ids_used: int
    seq_ids_max: int
    other_kv_bytes: int
    kv_bytes: int
    seq: int
    ts: float


@dataclass(frozen=True)
class PoolCompacted(PoolRow):
    """The pool that took the place of another; `compacted` says who moved and what became of the old one."""

    compacted: Mapping[str, Any]


@dataclass(frozen=True)
class PoolName:
    """Which pool."""

    pool_id: int
    name: str | None


@dataclass(frozen=True)
class PoolReleased(PoolName):
    """It is gone, and those below it."""

    detached_sessions: Sequence[str]
    released: bool
    released_pools: Sequence[int]


@dataclass(frozen=True)
class PoolReleasing(PoolName):
    """It goes when its requests have ended."""

    detached_sessions: Sequence[str]
    residency: str
    n_running: int


@dataclass(frozen=True)
class PoolEvicted(PoolName):
    """False: it had no KV."""

    evicted: bool


@dataclass(frozen=True)
class Kept:
    """A pool that a flush left, and what keeps it."""

    pool_id: int
    kept_by: str


@dataclass(frozen=True)
class SubtreeFlushed(PoolName):
    """Pools whose KV went, and those that kept it."""

    evicted: Sequence[int]
    kept: Sequence[Kept]


@dataclass(frozen=True)
class PoolTokens:
    """The ids of its whole prefix."""

    pool_id: int
    prefix_len: int
    tokens: Sequence[int]


@dataclass(frozen=True)
class PoolText:
    """The text of its whole prefix."""

    pool_id: int
    prefix_len: int
    text: str


@dataclass(frozen=True)
class DiffSide(PoolName):
    """One of two pools, and how it goes on where they part."""

    prefix_len: int
    next_token: int | None
    text: str | None


@dataclass(frozen=True)
class Diff:
    """Where two pools part."""

    common_len: int
    equal: bool
    a: DiffSide
    b: DiffSide


@dataclass(frozen=True)
class PromptMatch:
    """What one prompt of a request would share."""

    n_prompt: int
    pool_id: int | None
    name: str | None
    residency: str | None
    prefix_len: int | None
    attaches: bool
    n_matched: int
    n_shared: int
    why_not: str | None
    first_differing_position: int | None
    pool_text: str | None
    prompt_text: str | None


@dataclass(frozen=True)
class Match:
    """What a request would share."""

    route: str
    prompts: Sequence[PromptMatch]


@dataclass(frozen=True)
class CheckedPosition:
    """One position of a check."""

    position: int
    max_abs_diff: float
    ok: bool


@dataclass(frozen=True)
class PoolChecked(PoolName):
    """The outcome of a check against a computation without the pool."""

    verdict: str
    reason: str | None
    n_positions: int
    max_abs_diff: float | None
    tolerance: float | None
    positions: Sequence[CheckedPosition]
    n_tokens_computed: int
    took_s: float
    residency: str
    quarantined: Sequence[int]


@dataclass(frozen=True)
class SessionList:
    """Named sessions, and running requests that named none."""

    sessions: Sequence[SessionRow]
    seq: int
    ts: float


@dataclass(frozen=True)
class SessionShown(SessionRow):
    """One session."""

    seq: int
    ts: float


@dataclass(frozen=True)
class SessionEnded:
    """What its end freed."""

    session_id: str
    ended: bool
    cancelled: int
    cells_freed: int


@dataclass(frozen=True)
class Savings:
    """What pools spared, in all and by day."""

    n_requests: int
    n_tokens: int
    seconds: float
    misses: Mapping[str, Any]
    days: Sequence[Mapping[str, Any]]
    seq: int
    ts: float


@dataclass(frozen=True)
class EngineCapacity(Capacity):
    """Room in the engine, and for one more session without a pool."""

    cells_used: int
    cells_total: int
    kv_bytes_used: int
    kv_bytes_total: int
    slots_busy: int
    n_pools: int
    max_pool_objects: int
    n_sessions: int
    n_requests: int
    boot_id: str | None
    update: int
    seq: int
    ts: float


@dataclass(frozen=True)
class PoolCapacity(Capacity):
    """Room for one more session of a pool."""

    pool_id: int
    name: str | None
    mean_pool_tps: float | None
    seq: int
    ts: float


@dataclass(frozen=True)
class PolicyRuling:
    """The policy that holds, and the pool that it comes from when it is not its own."""

    policy: Policy | None
    inherited_from: int | None


@dataclass(frozen=True)
class PolicyStandings(PolicyRuling):
    """The default policy, all others, and who waits."""

    max_running: int | None
    max_queued: int | None
    n_running: int
    n_queued: int
    policies: Sequence[Mapping[str, Any]]
    queue: Sequence[Mapping[str, Any]]
    seq: int
    ts: float


@dataclass(frozen=True)
class PolicyDropped(PolicyRuling):
    """False: there was none."""

    removed: bool


@dataclass(frozen=True)
class Decisions:
    """The last decisions, newest first, and how many of each outcome there were."""

    decisions: Sequence[Mapping[str, Any]]
    counts: Sequence[Mapping[str, Any]]
    seq: int
    ts: float


@dataclass(frozen=True)
class Peers:
    """Who shares the engine's device."""

    enabled: bool
    why: str | None
    gpu_key: str | None
    peers: Sequence[PeerRow]


@dataclass(frozen=True)
class Weight:
    """The engine's new weight."""

    weight: float
    gpu_key: str | None
    slot: int | None


@dataclass(frozen=True)
class Health:
    """How the engine, pools and disk are; more for holders of a key."""

    pools: Mapping[str, Any]
    declared: Mapping[str, Any] | None
    kv_disk: Mapping[str, Any]
    gpu_share: Mapping[str, Any]
    admission: Mapping[str, Any]


@dataclass(frozen=True)
class Speeds(Whole):
    """Tokens per second now, of the engine as a whole and of each session."""

    linked: bool
    sessions: Sequence[SessionRow]
    seq: int
    ts: float
