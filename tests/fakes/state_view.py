"""Views made by hand, for what only reads them."""

from __future__ import annotations

from dataclasses import replace

from polykv_proxy.runtime.rows import GpuRow, PeerRow, PoolRow, SessionRow, StateView, Whole


def pool(pool_id: int, **facts: object) -> PoolRow:
    """A resident pool; what is not given here is None."""
    usual = {"residency": "resident", "own_kv_bytes": 100, "pinned": False, "n_hits": 3, "n_queries": 4, "saved_bytes": 70}
    saved = {"savings": {"n_requests": 3, "n_tokens": 400, "seconds": 4.0, "misses": {}}}
    return PoolRow(**{**dict.fromkeys(PoolRow.__slots__), **usual, **saved, "pool_id": pool_id, **facts})  # type: ignore[arg-type]


def session(pool_id: int | None, tps: float | None) -> SessionRow:
    """A session that generates with this speed, or rests."""
    plain = dict.fromkeys(SessionRow.__slots__)
    facts = {"pool_id": pool_id, "state": "idle" if tps is None else "active", "tps_ewma": tps}
    return SessionRow(**{**plain, **facts})  # type: ignore[arg-type]


WHOLE = Whole(
    aggregate_tps=7.0,
    prompt_tps=10.0,
    mean_active_tps=3.5,
    n_active=2,
    n_warming=0,
    compaction_pressure=0.5,
    cells_used=10,
    cells_total=100,
    slots_busy=2,
    slots_total=4,
    seq_ids_used=1,
    seq_ids_max=4,
    kv_streams_total=None,
    kv_streams_free=None,
    kv_cells_per_stream=None,
    kv_bytes_used=125,
    kv_bytes_total=1250,
    kv_bytes=125,
    other_kv_bytes=5,
    saved_tokens=400,
    saved_s=4.0,
)
PEER = PeerRow(pid=7, name="m", slot=0, weight=2.0, share_pct=100.0, busy_pct=50.0, active=True, heartbeat_age_ms=100)
GPU = GpuRow(enabled=True, gpu_key="k", why=None, me=PEER, peers=(replace(PEER, slot=3, share_pct=0.0),))
FULL = StateView(
    seq=1,
    ts=0.0,
    linked=True,
    boot_id="b",
    whole=WHOLE,
    pools=(pool(1),),
    sessions=(session(1, 5.0), session(1, None), session(None, 2.0)),
    gpu=GPU,
)
EMPTY = replace(
    FULL,
    linked=False,
    whole=replace(WHOLE, mean_active_tps=None),
    pools=(),
    sessions=(),
    gpu=GpuRow(enabled=False, gpu_key=None, why="a toy", me=None, peers=()),
)
