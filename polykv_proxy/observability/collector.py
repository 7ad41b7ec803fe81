"""Families of this moment: one Collector over what the runtime reads and what was counted.

Law: made of values that are there; awaits nothing and asks nobody. What is not known is left out, never guessed and never NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from polykv_proxy.core.admission.gate import Gate
from polykv_proxy.core.histogram import Histogram
from polykv_proxy.core.pools import Residency, Verdict
from polykv_proxy.core.tally import Copied, Ending, Evicted, PoolTally, Rebuilt, RelayTally, Route, Unwelcome
from polykv_proxy.core.turn_tally import NotShared, Reason, TurnTally
from polykv_proxy.engine.status import EngineState
from polykv_proxy.observability import catalog
from polykv_proxy.observability.admission_families import admission_families
from polykv_proxy.observability.contract import ServerFacts, Tokens
from polykv_proxy.observability.engine_source import EngineSource, Failure
from polykv_proxy.observability.pool_labels import NONE, PoolCounter, PoolLabels
from polykv_proxy.runtime.rows import GpuRow, StateView

Word = TypeVar("Word", bound=StrEnum)

BLOCK_TOKENS = 16
"""The engine counts single cells; pickers want blocks."""
_LOOSE = 0
"""No pool has this id."""
_ACTIVE = "active"
_SESSION_STATES = ("idle", "warming", _ACTIVE)
SLEEPING = "sleeping"
"""A state of a ready engine that has given its memory back."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Plain figures of the runtime."""

    restarts: int = 0
    event_gaps: int = 0
    watcher_gaps: int = 0
    journal_errors: int = 0
    replays: int = 0
    in_flight: int = 0
    kv_disk_max: int = 0


@dataclass(frozen=True, slots=True)
class Sources:
    """What the page is made of. Functions give the values of now."""

    view: Callable[[], StateView]
    server: Callable[[StateView], ServerFacts]
    used_bytes: Callable[[StateView], float]
    counts: Callable[[], Counts]
    engine_state: Callable[[], str]
    model_name: Callable[[], str]
    relay: RelayTally
    turns: TurnTally
    pools: PoolTally
    gate: Gate
    engine_page: EngineSource
    loop_lag: Histogram
    version: str


class ProxyCollector(Collector):
    """Our part of the page."""

    def __init__(self, sources: Sources) -> None:
        self._from = sources
        self._labels = PoolLabels()
        self._hits, self._queries = PoolCounter(self._labels), PoolCounter(self._labels)
        self._saved_tokens, self._saved_s = PoolCounter(self._labels), PoolCounter(self._labels)

    def collect(self) -> Iterator[Metric]:
        """All families, by the sections of the catalogue."""
        view = self._from.view()
        yield from self._pools(view)
        yield from self._server(self._from.server(view))
        yield from self._requests()
        yield from self._speed(view)
        yield from self._kv(view)
        yield from _device(view.gpu)
        yield from admission_families(self._from.gate, self._labels)
        yield from self._proxy(view)

    def _pools(self, view: StateView) -> Iterator[Metric]:
        pools, labels = view.pools, self._labels
        labels.see([row.pool_id for row in pools])
        speeds, sessions = _by_pool(view)
        yield catalog.POOL_TPS.each({NONE: speeds.pop(_LOOSE), **labels.sums(speeds)})
        own = labels.sums({row.pool_id: row.own_kv_bytes for row in pools})
        yield catalog.POOL_KV_BYTES.each({NONE: view.whole.other_kv_bytes, **own})
        yield catalog.POOL_SESSIONS.each({NONE: sessions.pop(_LOOSE), **labels.sums(sessions)})
        yield catalog.POOL_HITS.each({NONE: 0, **self._hits.sums({row.pool_id: row.n_hits for row in pools})})
        asked = self._queries.sums({row.pool_id: row.n_queries for row in pools})
        yield catalog.POOL_QUERIES.each({NONE: self._from.turns.not_shared[NotShared.NO_POOL], **asked})
        yield catalog.POOL_SAVED_TOKENS.each(self._saved_tokens.sums({row.pool_id: row.savings["n_tokens"] for row in pools}))
        yield catalog.POOL_SAVED_SECONDS.each(self._saved_s.sums({row.pool_id: row.savings["seconds"] for row in pools}))

    def _server(self, server: ServerFacts) -> Iterator[Metric]:
        name = self._from.model_name()
        yield catalog.RUNNING.one(server.n_running, name)
        yield catalog.WAITING.one(server.n_waiting, name)
        if server.usage is not None:
            yield catalog.KV_USAGE.one(server.usage, name)
            yield catalog.OLD_KV_USAGE.one(server.usage, name)
        if server.n_cells is not None:
            blocks = str(server.n_cells // BLOCK_TOKENS)
            yield catalog.CACHE_CONFIG.info(model_name=name, block_size=str(BLOCK_TOKENS), num_gpu_blocks=blocks)
        if server.tokens is not None:
            yield from _tokens(server.tokens, name)
        yield catalog.TTFT.histogram(self._from.turns.ttft_s, name)
        yield catalog.GAPS.histogram(self._from.turns.gaps_s, name)

    def _requests(self) -> Iterator[Metric]:
        relay, turns = self._from.relay, self._from.turns
        yield catalog.REQUESTS.many({(route, ending): relay.ended[route, ending] for route in Route for ending in Ending})
        yield catalog.IN_FLIGHT.one(self._from.counts().in_flight)
        yield catalog.CONNECTIONS.one(relay.n_opened - relay.n_closed)
        yield catalog.UNWELCOME.each({why: relay.unwelcome[why] for why in Unwelcome})
        yield catalog.RELAY_DELAY.histogram(relay.delay_s)
        yield catalog.PLAN.histogram(relay.plan_s)
        yield catalog.TURNS.each(_all(Reason, turns.ended))
        yield catalog.QUEUE.histogram(turns.queue_s)
        yield catalog.TURN_TTFT.histogram(turns.ttft_s)
        yield catalog.TPOT.histogram(turns.tpot_s)

    def _speed(self, view: StateView) -> Iterator[Metric]:
        whole, states = view.whole, Counter(row.state for row in view.sessions)
        yield catalog.AGGREGATE_TPS.one(whole.aggregate_tps)
        if whole.mean_active_tps is not None:
            yield catalog.MEAN_TPS.one(whole.mean_active_tps)
        yield catalog.PROMPT_TPS.one(whole.prompt_tps)
        yield catalog.SESSIONS.each({state: states[state] for state in _SESSION_STATES})
        yield catalog.PRESSURE.one(whole.compaction_pressure)

    def _kv(self, view: StateView) -> Iterator[Metric]:
        whole, residency = view.whole, Counter(row.residency for row in view.pools)
        yield catalog.POOLS.each({each: residency[each] for each in Residency})
        yield catalog.PINNED.one(sum(row.pinned for row in view.pools))
        if view.linked:
            yield catalog.SEQ_IDS.one(whole.seq_ids_used)
            yield catalog.MAX_SEQ_IDS.one(whole.seq_ids_max)
            yield catalog.CELLS.one(whole.cells_used)
            yield catalog.MAX_CELLS.one(whole.cells_total)
            yield catalog.KV_BYTES.each(_by_owner(view))
            yield catalog.OWNED_BYTES.one(whole.kv_bytes)
            yield catalog.USED_BYTES.one(self._from.used_bytes(view))
        yield catalog.NOT_SHARED.each(_all(NotShared, self._from.turns.not_shared))
        yield catalog.SAVED_TOKENS.one(self._from.turns.n_shared)
        yield catalog.SAVED_SECONDS.one(self._from.turns.saved_s)
        yield catalog.REBUILDS.each(_all(Rebuilt, self._from.pools.rebuilds))
        yield catalog.EVICTIONS.each(_all(Evicted, self._from.pools.evictions))
        yield catalog.DISK_BYTES.one(sum(row.saved_bytes for row in view.pools))
        yield catalog.MAX_DISK_BYTES.one(self._from.counts().kv_disk_max)
        yield catalog.COPIES.each(_all(Copied, self._from.pools.copies))
        yield catalog.CHECKS.each(_all(Verdict, self._from.pools.checks))

    def _proxy(self, view: StateView) -> Iterator[Metric]:
        counts, page = self._from.counts(), self._from.engine_page
        yield catalog.BUILD.info(version=self._from.version)
        now = self._from.engine_state()
        states = [*(state.value for state in EngineState), SLEEPING]
        yield catalog.ENGINE_STATE.each({state: float(state == now) for state in states})
        yield catalog.LINKED.one(view.linked)
        yield catalog.RESTARTS.one(counts.restarts)
        yield catalog.PAGE_FAILURES.each(_all(Failure, page.failures))
        if page.age_s is not None:
            yield catalog.PAGE_AGE.one(page.age_s)
        yield catalog.EVENT_GAPS.one(counts.event_gaps)
        yield catalog.WATCHER_GAPS.one(counts.watcher_gaps)
        yield catalog.LOOP_LAG.histogram(self._from.loop_lag)
        yield catalog.JOURNAL_ERRORS.one(counts.journal_errors)
        yield catalog.REPLAYS.one(counts.replays)


def _device(gpu: GpuRow) -> Iterator[Metric]:
    """Peers by slot: the registry has sixteen."""
    yield catalog.GPU_SHARED.one(gpu.enabled)
    rows = ([gpu.me] if gpu.me else []) + list(gpu.peers)
    yield catalog.GPU_PEERS.one(len(rows))
    if gpu.me is not None:
        yield catalog.GPU_SLOT.one(gpu.me.slot)
    yield catalog.PEER_WEIGHT.each({str(row.slot): row.weight for row in rows})
    yield catalog.PEER_SHARE.each({str(row.slot): row.share_pct / 100 for row in rows})
    yield catalog.PEER_BUSY.each({str(row.slot): row.busy_pct / 100 for row in rows})
    yield catalog.PEER_ACTIVE.each({str(row.slot): row.active for row in rows})
    yield catalog.PEER_AGE.each({str(row.slot): row.heartbeat_age_ms / 1000 for row in rows})


def _tokens(tokens: Tokens, name: str) -> Iterator[Metric]:
    for queries in (catalog.PREFIX_QUERIES, catalog.OLD_PREFIX_QUERIES, catalog.PROMPT_TOKENS):
        yield queries.one(tokens.n_prompt, name)
    for hits in (catalog.PREFIX_HITS, catalog.OLD_PREFIX_HITS):
        yield hits.one(tokens.n_cached, name)
    yield catalog.GENERATION_TOKENS.one(tokens.n_generated, name)


def _by_pool(view: StateView) -> tuple[dict[int, float], dict[int, float]]:
    """What the sessions of each pool generate now, and how many they are; `_LOOSE` are those of none."""
    speeds = {_LOOSE: 0.0, **{row.pool_id: 0.0 for row in view.pools}}
    numbers = dict.fromkeys(speeds, 0.0)
    for session in view.sessions:
        pool_id = session.pool_id or _LOOSE
        if pool_id not in speeds:
            pool_id = _LOOSE
        numbers[pool_id] += 1
        if session.state == _ACTIVE:
            speeds[pool_id] += session.tps_ewma or 0.0
    return speeds, numbers


def _by_owner(view: StateView) -> dict[str, float]:
    """What pools made themselves, what their sessions alone hold, and the rest; the sum is `whole.kv_bytes`."""
    pools = sum(row.own_kv_bytes for row in view.pools)
    other = view.whole.other_kv_bytes
    return {"pool": pools, "session": view.whole.kv_bytes - pools - other, "other": other}


def _all(words: type[Word], counts: Mapping[Word, int]) -> dict[str, float]:
    """A count for each word, 0 for those that have not occurred: a series that is there from the start can be watched."""
    return {word: counts.get(word, 0) for word in words}
