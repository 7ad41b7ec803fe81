"""What the gate decided and who waits, as metrics.

Law: reads only. Every pair that may occur is there before it does; a policy's pool is a label as all pools are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

from polykv_proxy.core.admission.decisions import ADVICE, BARS, ENDS
from polykv_proxy.core.admission.gate import Gate
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Ruling
from polykv_proxy.observability import catalog
from polykv_proxy.observability.pool_labels import NONE, PoolLabels


def admission_families(gate: Gate, labels: PoolLabels) -> Iterator[Metric]:
    """The section of the catalogue. Policies of pools that the page does not have (yet) are left out."""
    decided = gate.decisions
    yield catalog.DECISIONS.many({pair: decided.ends[pair] for pair in sorted(ENDS | set(decided.ends))})
    yield catalog.HOLDS.each({arm: decided.holds[arm] for arm in BARS})
    yield catalog.ADVICE.many({pair: decided.would[pair] for pair in sorted(ADVICE | set(decided.would))})
    yield catalog.WAITS.histogram(decided.waits_s)
    yield catalog.QUEUED.one(len(gate.lines))
    yield catalog.ADMITTED.one(len(gate.outlook.reservations))
    yield catalog.FLOOR_TPS.many(_floors(gate, labels))
    yield catalog.SETTLING.each(_settling(gate, labels))


def _shown(gate: Gate, labels: PoolLabels) -> list[tuple[str, Ruling]]:
    seen = [one for one in gate.outlook.policies if one.scope == DEFAULT_SCOPE or labels.sees(one.scope)]
    return [(NONE if one.scope == DEFAULT_SCOPE else labels.of(one.scope), one) for one in seen]


def _floors(gate: Gate, labels: PoolLabels) -> Mapping[tuple[str, ...], float]:
    """Of those that share a label the highest: who keeps it keeps all."""
    found: dict[tuple[str, ...], float] = {}
    for label, ruling in _shown(gate, labels):
        key = (label, ruling.policy.mode.value)
        found[key] = max(found.get(key, 0.0), gate.outlook.policies.floor(ruling))
    return found


def _settling(gate: Gate, labels: PoolLabels) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for label, ruling in _shown(gate, labels):
        found[label] = found.get(label, 0.0) + gate.outlook.forecasts[ruling.scope].settling
    return found
