"""What `…/capacity` says: whether one more session may start, and everything that this was decided from.

Law: asks and changes nothing. The arm that decides here is the arm that would decide at the gate; every figure is finite or None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from polykv_proxy.core.admission import arms
from polykv_proxy.core.admission.arms import Taken
from polykv_proxy.core.admission.gate import SERVER_LINE, Gate
from polykv_proxy.core.admission.line import Ask
from polykv_proxy.core.admission.load import Load
from polykv_proxy.core.admission.outlook import Look
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Ruling
from polykv_proxy.core.admission.verdict import Arm, Finding, Reason


@dataclass(frozen=True, slots=True)
class Capacity:
    """One report. Names are those of the source documents where these have one; cells are those of KV, `_pct` goes to 100.

    `policy_pool`: the pool whose policy holds here; None without one, and for the default policy (`mode` is set then).
    """

    can_admit: bool
    reason: str
    arm: str
    value: float | None
    threshold: float | None
    headroom_sessions: int
    mode: str | None
    on_saturation: str | None
    target_tps_per_session: float | None
    policy_pool: int | None
    mean_active_tps: float | None
    n_active: int
    n_warming: int
    n_pool_sessions: int
    guaranteed: bool
    known_session: bool
    settling: bool
    settle_remaining_ms: int
    projected_mean_tps_if_admitted: float | None
    projected_mean_tps_model: float | None
    projected_mean_tps_measured: float | None
    projected_idle_estimate: bool
    drop_per_admit_ewma: float | None
    kv_headroom_pct: float | None
    kv_cells_total: int
    kv_cells_free: int
    kv_cells_idle: int
    kv_cells_reserved: int
    expected_tokens: int
    slots_total: int
    slots_free: int
    kv_streams_total: int | None
    kv_streams_free: int | None
    kv_cells_per_stream: int | None
    seq_ids_used: int
    seq_ids_max: int
    compaction_pressure: float
    n_queued: int
    expected_wait_ms: int | None

    def as_object(self) -> Mapping[str, object]:
        """JSON-ready."""
        return asdict(self)


def capacity(
    gate: Gate,
    load: Load,
    now: float,
    pool_id: int | None = None,
    *,
    n_prefix: int = 0,
    expected_tokens: int | None = None,
    session: str | None = None,
    compaction_pressure: float = 0.0,
) -> Capacity:
    """For a session of that pool, or of none. `expected_tokens`: private ones, prompt and answer; None is charged by estimate."""
    n_prompt, max_tokens = (expected_tokens, 0) if expected_tokens is not None else (0, None)
    ask = Ask(0, pool_id, session, n_prefix, n_prompt, max_tokens)
    ruling, known = gate.outlook.policies.ruling(pool_id), gate.outlook.attached.known(session)
    look = gate.outlook.look(ask, ruling, load, now)
    found = Finding(True, Arm.CONTINUATION, Reason.CONTINUATION) if known else gate.outlook.examine(ask, look, load, settled=False)
    line = SERVER_LINE if ruling is None or not ruling.policy.enforced else pool_id or DEFAULT_SCOPE
    return Capacity(
        can_admit=found.ok,
        reason=found.reason.value,
        arm=found.arm.value,
        value=found.value,
        threshold=found.threshold,
        headroom_sessions=gate.outlook.headroom(look, ruling, load),
        n_active=load.n_active,
        n_pool_sessions=look.scope.n_attached,
        guaranteed=found.arm is Arm.GUARANTEE,
        known_session=known,
        expected_tokens=look.need.cells,
        mean_active_tps=load.mean_active_tps,
        compaction_pressure=compaction_pressure,
        seq_ids_used=load.seq_ids_used,
        seq_ids_max=load.seq_ids_max,
        n_queued=gate.lines.length(line),
        expected_wait_ms=_millis(gate.turnover.wait_s(now, gate.lines.length(line))) if gate.lines.length(line) else None,
        **_ruled(ruling),
        **_forecast(gate, ruling, look, load),
        **_matter(load, look.taken),
    )


def _ruled(ruling: Ruling | None) -> dict[str, Any]:
    policy = ruling.policy if ruling is not None else None
    return {
        "mode": policy.mode.value if policy is not None else None,
        "on_saturation": policy.on_saturation.value if policy is not None else None,
        "target_tps_per_session": policy.target_tps_per_session if policy is not None else None,
        "policy_pool": ruling.scope if ruling is not None and ruling.scope != DEFAULT_SCOPE else None,
    }


def _forecast(gate: Gate, ruling: Ruling | None, look: Look, load: Load) -> dict[str, Any]:
    projection = look.scope.projection
    return {
        "settling": look.scope.settling_s is not None,
        "settle_remaining_ms": _millis(look.scope.settling_s) or 0,
        "n_warming": look.pending.warming,
        "projected_mean_tps_if_admitted": projection.used,
        "projected_mean_tps_model": projection.model,
        "projected_mean_tps_measured": projection.measured,
        "projected_idle_estimate": projection.idle,
        "drop_per_admit_ewma": gate.outlook.forecasts[ruling.scope].drop_ewma if ruling is not None else None,
    }


def _matter(load: Load, taken: Taken) -> dict[str, Any]:
    left = max(0, arms.available(load, taken))
    return {
        "kv_headroom_pct": 100 * left / load.cells_total if load.has_cells else None,
        "kv_cells_total": load.cells_total,
        "kv_cells_free": load.cells_free,
        "kv_cells_idle": load.cells_idle,
        "kv_cells_reserved": taken.cells,
        "slots_total": load.slots_total,
        "slots_free": max(0, load.slots_total - load.slots_busy - taken.slots),
        "kv_streams_total": load.streams_total,
        "kv_streams_free": load.streams_free,
        "kv_cells_per_stream": load.cells_per_stream,
    }


def _millis(seconds: float | None) -> int | None:
    return None if seconds is None else ceil(seconds * 1000)
