"""The metrics of one proxy, put together.

Law: made once by the composition root. It listens to the engine's state, and runs until it is cancelled.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector

from polykv_proxy.core.tally import RelayTally
from polykv_proxy.engine.status import EngineState, EngineStatus
from polykv_proxy.errors import EngineError
from polykv_proxy.observability.collector import SLEEPING, Counts, ProxyCollector, Sources
from polykv_proxy.observability.contract import ServerFacts, Tokens, by_page, by_protocol
from polykv_proxy.observability.engine_source import EngineSource
from polykv_proxy.observability.loop_lag import LoopLag
from polykv_proxy.observability.page import MetricsPage
from polykv_proxy.runtime.rows import StateView
from polykv_proxy.runtime.runtime import Runtime

log = logging.getLogger("polykv.metrics")

_ALIVE = frozenset({EngineState.READY, EngineState.DRAINING})
_UNNAMED = "unknown"


@dataclass(frozen=True, slots=True)
class RelayFacts:
    """What the relay tells: its tally, and how many requests are in flight, in all and on generating routes."""

    tally: RelayTally
    n_running: Callable[[], int]
    n_generating: Callable[[], int]


class Metrics:
    """`page` is what is served. `status` is the engine's state of now."""

    def __init__(self, runtime: Runtime, status: Callable[[], EngineStatus], relay: RelayFacts) -> None:
        self._runtime, self._status, self._relay = runtime, status, relay
        self._model = _UNNAMED
        self._lag = LoopLag()
        self._engine_page = EngineSource(runtime.hub.client.metrics, self._life)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(ProxyCollector(self._sources()))
        ProcessCollector("polykv", registry=registry)
        self.page = MetricsPage(self._engine_page, registry.collect)

    async def run(self) -> None:
        """Measure the loop and make pages ahead, for ever."""
        try:
            await asyncio.gather(self.page.run(), self._lag.run())
        finally:
            await self._engine_page.stop()

    def engine_changed(self, status: EngineStatus) -> None:
        """The engine's state changed: one that has become ready is asked for its page, and what its model is called."""
        if status.state is EngineState.READY:
            self._engine_page.refresh()
            self._runtime.hub.spawn(self._learn_name())

    async def _learn_name(self) -> None:
        try:
            self._model = await self._runtime.hub.client.model_id() or _UNNAMED
        except EngineError as error:
            log.info("the engine does not say what its model is called: %s", error)

    def _life(self) -> int | None:
        status = self._status()
        return status.boots if status.state in _ALIVE else None

    def _sources(self) -> Sources:
        hub = self._runtime.hub
        return Sources(
            view=self._runtime.glance.now,
            server=self._server,
            used_bytes=lambda view: view.whole.kv_bytes_used,
            counts=self._counts,
            engine_state=self._engine_state,
            model_name=lambda: self._model,
            relay=self._relay.tally,
            turns=hub.telemetry.turns,
            pools=hub.tally,
            gate=self._runtime.admission.gate,
            engine_page=self._engine_page,
            loop_lag=self._lag.seconds,
            version=importlib.metadata.version("polykv-proxy"),
        )

    def _server(self, view: StateView) -> ServerFacts:
        hub, in_flight = self._runtime.hub, self._relay.n_generating()
        if hub.absent is not None:
            return by_page(self._engine_page.page, in_flight)
        telemetry = hub.telemetry
        tokens = Tokens(telemetry.turns.n_prompt, telemetry.turns.n_cached, telemetry.throughput.totals.n_decoded)
        return by_protocol(view, hub.hello, telemetry.live.state, tokens, in_flight)

    def _engine_state(self) -> str:
        status, live = self._status(), self._runtime.hub.telemetry.live.state
        asleep = status.state is EngineState.READY and live is not None and live.phase == SLEEPING
        return SLEEPING if asleep else status.state.value

    def _counts(self) -> Counts:
        hub = self._runtime.hub
        return Counts(
            restarts=self._status().restarts,
            event_gaps=hub.telemetry.n_gaps,
            watcher_gaps=hub.telemetry.news.n_gaps,
            journal_errors=hub.journal.n_errors,
            replays=self._runtime.pools.desk.n_replayed,
            in_flight=self._relay.n_running(),
            kv_disk_max=self._runtime.vault.limit,
        )
