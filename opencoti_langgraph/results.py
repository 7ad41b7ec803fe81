"""What the proxy answers, typed.

Law: frozen values. Fields that a newer proxy adds are kept (`model_extra`), fields that an older one lacks are None: an answer is
never refused for its age.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PoolRef = int | str
"""A pool's id or its name."""


class Result(BaseModel):
    """Base of all results."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


class PoolSession(Result):
    """A session as its pool lists it."""

    session_id: str | None = None
    state: str | None = None
    suffix_n_tokens: int | None = None
    marginal_kv_bytes: int | None = None
    tps_ewma: float | None = None
    ttft_ms: float | None = None


class Pool(Result):
    """One pool. `subtree` only where it was asked for by id."""

    pool_id: int
    name: str | None = None
    parent: int | None = None
    branch_pos: int = 0
    prefix_len: int | None = None
    prefix_hash: str | None = None
    n_shared: int | None = None
    residency: str
    reason: str | None = None
    source: str | None = None
    own_kv_bytes: int | None = None
    subtree_kv_bytes: int | None = None
    pinned: bool = False
    pin_until_ts: float | None = None
    orphaned_pin: bool = False
    kept_by: str | None = None
    n_running: int = 0
    children: list[int] = Field(default_factory=list)
    sessions: list[PoolSession] = Field(default_factory=list)
    ttl_s: float | None = None
    expires_ts: float | None = None
    subtree: list[Pool] | None = None

    @property
    def usable(self) -> bool:
        """May requests name it? What has no KV comes back with the next request."""
        return self.residency not in {"releasing", "failed"}


class PoolTree(Result):
    """All pools."""

    pools: list[Pool]
    tree_depth: int | None = None
    seq_ids_used: int | None = None
    seq_ids_max: int | None = None
    kv_bytes: int | None = None
    seq: int | None = None
    ts: float | None = None


class Compacted(Result):
    """What a compaction did beside making the new pool."""

    from_: int | None = Field(default=None, alias="from")
    migrated: list[str] = Field(default_factory=list)
    released: list[int] = Field(default_factory=list)
    retiring: list[int] = Field(default_factory=list)


class CompactedPool(Pool):
    """The pool that took the old one's place."""

    compacted: Compacted


class Released(Result):
    """`released` is False while requests run on it: it goes with the last one."""

    pool_id: int
    name: str | None = None
    released: bool = False
    residency: str | None = None
    n_running: int = 0
    released_pools: list[int] = Field(default_factory=list)
    detached_sessions: list[str] = Field(default_factory=list)


class Evicted(Result):
    """`evicted` is False when there was no KV."""

    pool_id: int
    name: str | None = None
    evicted: bool


class Flushed(Result):
    """Which pools of a subtree lost their KV, and why the others kept theirs."""

    pool_id: int
    name: str | None = None
    evicted: list[int]
    kept: list[dict[str, Any]]


class PoolTokens(Result):
    """A pool's prefix as ids."""

    pool_id: int
    prefix_len: int
    tokens: list[int]


class PoolText(Result):
    """A pool's prefix as text."""

    pool_id: int
    prefix_len: int
    text: str


class DiffSide(Result):
    """One pool of a comparison."""

    pool_id: int
    name: str | None = None
    prefix_len: int
    next_token: int | None = None
    text: str | None = None


class Diff(Result):
    """Where two pools part."""

    common_len: int
    equal: bool
    a: DiffSide
    b: DiffSide


class PromptMatch(Result):
    """What one prompt would share."""

    n_prompt: int
    pool_id: int | None = None
    name: str | None = None
    prefix_len: int | None = None
    attaches: bool = False
    n_matched: int = 0
    n_shared: int = 0
    why_not: str | None = None
    first_differing_position: int | None = None
    pool_text: str | None = None
    prompt_text: str | None = None


class Match(Result):
    """What a request would share, without running it."""

    route: str
    prompts: list[PromptMatch]


class Verification(Result):
    """A pool's KV held against a computation without it."""

    pool_id: int
    verdict: Literal["ok", "mismatch", "inconclusive"]
    reason: str | None = None
    max_abs_diff: float | None = None
    residency: str | None = None
    quarantined: list[int] = Field(default_factory=list)


class Session(Result):
    """One session, or one running request without a name (`ephemeral`)."""

    session_id: str | None = None
    ephemeral: bool = False
    pool_id: int | None = None
    state: str | None = None
    tps_ewma: float | None = None
    tps_last_turn: float | None = None
    ttft_ms: float | None = None
    n_turns: int | None = None
    ctx_used: int | None = None
    ctx_total: int | None = None
    ctx_headroom_tokens: int | None = None
    n_shared: int | None = None


class Sessions(Result):
    """All sessions."""

    sessions: list[Session]
    seq: int | None = None
    ts: float | None = None


class EndedSession(Result):
    """A session that is gone."""

    session_id: str
    ended: bool
    cancelled: bool | int | None = None
    cells_freed: int | None = None


class Capacity(Result):
    """How much room there is. Without a policy, and with proxies that have no admission, the fields of admission are None."""

    can_admit: bool | None = None
    reason: str | None = None
    arm: str | None = None
    headroom_sessions: int | None = None
    mean_active_tps: float | None = None
    projected_mean_tps_if_admitted: float | None = None
    target_tps_per_session: float | None = None
    settling: bool = False
    settle_remaining_ms: float | None = None
    n_active: int | None = None
    n_warming: int | None = None
    guaranteed: bool = False
    known_session: bool = False
    kv_headroom_pct: float | None = None
    expected_wait_ms: float | None = None
    compaction_pressure: float | None = None
    slots_busy: int | None = None
    slots_total: int | None = None
    slots_free: int | None = None
    cells_used: int | None = None
    cells_total: int | None = None
    seq_ids_used: int | None = None
    seq_ids_max: int | None = None
    seq: int | None = None
    ts: float | None = None


class Policy(Result):
    """What holds for new sessions."""

    mode: str = "advisory"
    on_saturation: str = "reject"
    target_tps_per_session: float | None = None
    guarantee_min_sessions: int | None = None
    settle_tokens: int | None = None
    settle_max_ms: int | None = None
    max_queue: int | None = None
    queue_timeout_ms: int | None = None


class Admission(Result):
    """The policy that holds (None without one), the pool above that it is from, and who waits in line."""

    pool_id: int | None = None
    name: str | None = None
    policy: Policy | None = None
    inherited_from: int | None = None
    removed: bool | None = None
    queue: list[dict[str, Any]] = Field(default_factory=list)


class Decisions(Result):
    """What admission decided last, newest first, and counts by arm and outcome."""

    decisions: list[dict[str, Any]]
    counts: Any = None
    seq: int | None = None
    ts: float | None = None


class Tps(Result):
    """Speeds at one moment."""

    ts: float | None = None
    seq: int | None = None
    linked: bool = True
    aggregate_tps: float | None = None
    prompt_tps: float | None = None
    mean_active_tps: float | None = None
    n_active: int = 0
    n_warming: int = 0
    compaction_pressure: float | None = None
    saved_tokens: int | None = None
    saved_s: float | None = None
    sessions: list[Session] = Field(default_factory=list)


class Event(Result):
    """Something that happened. `topic` is `pool`, `session`, `request`, `engine`, … or `resync`: then look at the listings."""

    topic: str
    seq: int | None = None
    ts: float | None = None
    type: str | None = None
    pool_id: int | None = None
    session_id: str | None = None


class Progress(Result):
    """How far a pool is that is being made. The first one has the `pool_id` alone."""

    pool_id: int | None = None
    total: int | None = None
    cached: int | None = None
    processed: int | None = None
    t_ms: float | None = None


class Savings(Result):
    """What pools spared."""

    n_requests: int
    n_tokens: int
    seconds: float
    misses: dict[str, Any] = Field(default_factory=dict)
    days: list[dict[str, Any]] = Field(default_factory=list)


class Health(Result):
    """The engine's state, and whether there are pools."""

    state: str | None = None
    pools: dict[str, Any] | None = None


class Tokens(Result):
    """Token ids of a text."""

    tokens: list[int]


class Text(Result):
    """The text of token ids."""

    content: str
