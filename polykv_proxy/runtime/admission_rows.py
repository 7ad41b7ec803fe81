"""Policies as they are shown: the short form in the listing of pools, and each with what may start by it now.

Law: reads only, and asks the engine nothing: figures are those that were heard last.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from polykv_proxy.core.admission.capacity import capacity
from polykv_proxy.core.admission.gate import REFUSED
from polykv_proxy.core.admission.load import Load
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Ruling
from polykv_proxy.runtime.admission import Admission
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.load import load_of

MOST = 100
"""Policies in one answer."""
_SHORT = ("mode", "on_saturation", "target_tps_per_session")
_SHOWN = (
    "can_admit",
    "reason",
    "arm",
    "value",
    "threshold",
    "headroom_sessions",
    "n_pool_sessions",
    "settling",
    "settle_remaining_ms",
    "projected_mean_tps_if_admitted",
    "drop_per_admit_ewma",
)


def policy_row(ruling: Ruling | None, pool_id: int) -> Mapping[str, object] | None:
    """What holds for new sessions of a pool, in short."""
    if ruling is None:
        return None
    policy = ruling.policy.as_object()
    return {**{name: policy[name] for name in _SHORT}, "inherited_from": None if ruling.scope == pool_id else ruling.scope}


def standings(hub: Hub, admission: Admission) -> list[Mapping[str, object]]:
    """Each policy that was set, the default one first, and whether one more session may start by it."""
    load = load_of(hub, hub.telemetry.live.state) or Load()
    rulings = sorted(admission.gate.outlook.policies, key=lambda ruling: ruling.scope)
    return [_standing(hub, admission, ruling, load) for ruling in islice(rulings, MOST)]


def _standing(hub: Hub, admission: Admission, ruling: Ruling, load: Load) -> Mapping[str, object]:
    pool = hub.ledger.tree.get(ruling.scope) if ruling.scope != DEFAULT_SCOPE else None
    report = capacity(
        admission.gate,
        load,
        hub.clock.monotonic(),
        None if pool is None else pool.pool_id,
        n_prefix=0 if pool is None else pool.prefix_len,
    ).as_object()
    policy = ruling.policy.as_object()
    return {
        "pool_id": None if pool is None else pool.pool_id,
        "name": None if pool is None else pool.name,
        **{name: policy[name] for name in _SHORT},
        "floor_tps": admission.gate.outlook.policies.floor(ruling),
        **{name: report[name] for name in _SHOWN},
        "n_queued": sum(_waits_by(admission, waiting.ask.pool_id, ruling.scope) for waiting in admission.gate.lines),
    }


def _waits_by(admission: Admission, pool_id: int | None, scope: int) -> bool:
    """Is it this policy that holds for those of that pool, or of none?"""
    ruling = admission.ruling(pool_id)
    return ruling is not None and ruling.scope == scope


def summary(admission: Admission) -> Mapping[str, object]:
    """For the health page: numbers only."""
    gate, limits = admission.gate, admission.gate.limits
    modes = [ruling.policy.enforced for ruling in gate.outlook.policies]
    return {
        "n_policies": len(modes),
        "n_enforced": sum(modes),
        "max_running": limits.max_running,
        "max_queued": limits.max_queued,
        "n_running": len(gate.outlook.reservations),
        "n_queued": len(gate.lines),
        "n_refused": sum(n for (_, outcome), n in gate.decisions.ends.items() if outcome in REFUSED),
        "n_advised": sum(gate.decisions.would.values()),
    }
