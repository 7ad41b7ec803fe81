"""What is shown of everything at one moment: the one read model of streams, pages, metrics and listings.

Law: immutable values, JSON-ready, each field under the name by which callers know it. Made by view.py, and by nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PoolSession:
    """A session in the listing of its pool."""

    session_id: str
    state: str
    suffix_n_tokens: int
    marginal_kv_bytes: int
    tps_ewma: float | None
    ttft_ms: float | None


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool."""

    pool_id: int
    name: str | None
    parent: int | None
    branch_pos: int
    prefix_len: int
    prefix_hash: str
    n_shared: int
    residency: str
    reason: str | None
    source: str
    own_kv_bytes: int
    subtree_kv_bytes: int
    checkpoint_bytes: int
    pinned: bool
    pin_owner: str | None
    pin_until_ts: float | None
    orphaned_pin: bool
    kept_by: str | None
    n_running: int
    children: tuple[int, ...]
    sessions: tuple[PoolSession, ...]
    n_queries: int
    n_hits: int
    n_tokens_shared: int
    n_rebuilds: int
    n_restores: int
    saved_bytes: int
    n_verifies: int
    n_mismatches: int
    verified_ts: float | None
    verify_verdict: str | None
    savings: Mapping[str, Any]
    policy: Mapping[str, Any] | None
    ttl_s: float | None
    expires_ts: float | None
    created_ts: float
    last_access_ts: float


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A named session, or a running request without one (`ephemeral`, by its request number where it has one)."""

    session_id: str | None
    ephemeral: bool
    req: int | None
    pool_id: int | None
    state: str
    tps_ewma: float | None
    tps_last_turn: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    queue_ms: float | None
    prompt_tps: float | None
    n_streams: int
    n_turns: int
    n_slots: int
    resident: bool
    slot: int | None
    ctx_used: int
    ctx_total: int | None
    ctx_headroom_tokens: int | None
    n_shared: int
    created_ts: float | None
    last_used_ts: float | None


@dataclass(frozen=True, slots=True)
class Whole:
    """The engine as a whole. `mean_active_tps` is over those that decode and have a figure; all others that run are `n_warming`."""

    aggregate_tps: float
    prompt_tps: float
    mean_active_tps: float | None
    n_active: int
    n_warming: int
    compaction_pressure: float
    cells_used: int
    cells_total: int
    slots_busy: int
    slots_total: int
    seq_ids_used: int
    seq_ids_max: int
    kv_streams_total: int | None
    kv_streams_free: int | None
    kv_cells_per_stream: int | None
    kv_bytes_used: int
    kv_bytes_total: int
    kv_bytes: int
    other_kv_bytes: int
    saved_tokens: int
    saved_s: float


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One engine on the device. `share_pct` by the schedule: what it gets while those that are active now compute."""

    pid: int
    name: str
    slot: int
    weight: float
    share_pct: float
    busy_pct: float
    active: bool
    heartbeat_age_ms: int


@dataclass(frozen=True, slots=True)
class GpuRow:
    """Who shares the engine's device; `why` nothing is known of that. `me` is our engine, None while it has no place."""

    enabled: bool
    gpu_key: str | None
    why: str | None
    me: PeerRow | None
    peers: tuple[PeerRow, ...]


NO_DEVICE = GpuRow(enabled=False, gpu_key=None, why=None, me=None, peers=())


@dataclass(frozen=True, slots=True)
class StateView:
    """Everything at one moment. `linked`: the engine is followed; else its part is what is left of it."""

    seq: int
    ts: float
    linked: bool
    boot_id: str | None
    whole: Whole
    pools: tuple[PoolRow, ...]
    sessions: tuple[SessionRow, ...]
    gpu: GpuRow = NO_DEVICE

    def pool(self, pool_id: int) -> PoolRow | None:
        """The row of a pool."""
        return next((row for row in self.pools if row.pool_id == pool_id), None)


def as_json(row: Any) -> Mapping[str, object]:
    """A row as an object, rows within it too."""
    return {name: _plain(getattr(row, name)) for name in row.__slots__}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return as_json(value) if hasattr(value, "__dataclass_fields__") else value
