"""The rig with its metrics page behind a relay, as clients meet it; the engine's state is whatever the test says."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from polykv_proxy.api.app import build_app
from polykv_proxy.api.context import ApiContext, Keys
from polykv_proxy.api.relay import Relay, RelayProtocol, Routes, UpstreamPool
from polykv_proxy.engine.status import EngineState, EngineStatus
from polykv_proxy.observability.metrics import Metrics, RelayFacts
from polykv_proxy.ports import EngineAddress
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_server import QuietServer
from tests.integration.rig import Rig, rig

ENGINE_PAGE = b"""# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 40
# HELP llamacpp:prompt_tokens_cached_total Number of prompt tokens reused from the cache
# TYPE llamacpp:prompt_tokens_cached_total counter
llamacpp:prompt_tokens_cached_total 10
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 7
# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# HELP llamacpp:requests_deferred Number of requests deferred
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 3
"""
GIVEN = (200, "text/plain; version=0.0.4", ENGINE_PAGE)
OURS = 'polykv_engine_state{state="'
STRICT = {"accept": "application/openmetrics-text; version=1.0.0"}


@dataclass
class Scraped:
    """The page's client. `status` is the engine's state as the supervisor would have it."""

    proxy: Rig
    relay: Relay
    metrics: Metrics
    client: httpx.AsyncClient
    status: EngineStatus

    def engine(self, state: EngineState) -> None:
        """The engine's state changes."""
        boots = self.status.boots + (state is EngineState.STARTING)
        self.status = replace(self.status, state=state, boots=boots)
        self.metrics.engine_changed(self.status)

    async def page(self, **headers: str) -> str:
        """The page of this moment, made now; strict readers must be able to read both forms."""
        made = self.metrics.page._made
        self.proxy.clock.now += 1  # a look that is shared is not shared for ever
        now = time.monotonic()
        while True:  # one that is just being made ahead speaks of an earlier moment
            made.clear()
            strict = await self.client.get("/metrics", headers=STRICT)
            reply = await self.client.get("/metrics", headers=headers)
            if all(page.made_at >= now for page in made.values()):
                break
        assert (strict.status_code, reply.status_code) == (200, 200)
        list(read_openmetrics(strict.text))
        names = [family.name for family in read_text(reply.text)]
        assert len(names) == len(set(names))
        return reply.text

    async def samples(self) -> dict[str, float]:
        """Values by name and labels."""
        lines = [line for line in (await self.page()).splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    async def until(self, name: str, value: float | None = None) -> dict[str, float]:
        """Scrape until a sample has this value, or any but 0; only a hang ends it otherwise."""
        async with asyncio.timeout(20):
            while True:
                found = await self.samples()
                now = found.get(name)
                if now == value if value is not None else now:
                    return found
                await asyncio.sleep(0.005)

    async def ask(self, prompt: str, **more: Any) -> dict[str, Any]:
        """One completion through the relay."""
        reply = await self.client.post("/completion", json={"prompt": prompt, **more})
        assert reply.status_code == 200, reply.text
        return reply.json()


@asynccontextmanager
async def scraped(
    folder: Path, engine: FakeEngine | None = None, *, keys: Keys | None = None, prefix: str = ""
) -> AsyncIterator[Scraped]:
    """A running proxy side with its page."""
    async with rig(folder, engine, keys=keys) as proxy:
        pool = UpstreamPool()
        pool.open(EngineAddress(uds=str(proxy.server.path)))
        relay = Relay(pool, routes=Routes(api_prefix=prefix.encode(), own_exact=frozenset({prefix.encode() + b"/metrics"})))
        relay.gate = proxy.gate
        facts = RelayFacts(relay.tally, lambda: len(relay.running), lambda: relay.n_generating)
        found: list[Scraped] = []
        metrics = Metrics(proxy.runtime, lambda: found[0].status, facts)
        app = build_app(ApiContext(proxy.runtime, keys or Keys(), metrics=metrics.page, api_prefix=prefix))
        http: Any = functools.partial(RelayProtocol, relay=relay)
        server = QuietServer(uvicorn.Config(app, http=http, log_config=None, lifespan="off", ws="none"))
        sock = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.005)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        running = asyncio.create_task(metrics.run())
        try:
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as client:
                found.append(Scraped(proxy, relay, metrics, client, EngineStatus(EngineState.READY, 0.0, supervised=True, boots=1)))
                metrics.engine_changed(found[0].status)
                yield found[0]
        finally:
            running.cancel()
            relay.cut("draining", "test over")
            server.should_exit = server.force_exit = True
            await asyncio.gather(serving, running, return_exceptions=True)
            pool.drop_idle()
