"""A whole proxy side over a fake engine, without the relay unless `relayed`: runtime, gate and API, with a manual clock.

Law: the engine's requests go through the gate and then straight to the engine's socket, as the relay would send them.
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from polykv_proxy.api.additions import Additions
from polykv_proxy.api.app import build_app
from polykv_proxy.api.context import ApiContext, Keys
from polykv_proxy.api.gate import PoolGate
from polykv_proxy.api.local_names import LocalNames
from polykv_proxy.api.relay import Relay, RelayProtocol, UpstreamPool
from polykv_proxy.core.admission.gate import Limits
from polykv_proxy.core.admission.policy import Policy
from polykv_proxy.core.ledger import LedgerLimits
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.ports import EngineAddress, Plan, Refusal, RelayRequest, names_of
from polykv_proxy.runtime.orders import Declared
from polykv_proxy.runtime.runtime import Runtime, RuntimeOptions
from polykv_proxy.ui.page import add_page
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_server import FakeEngineServer, QuietServer


class ManualClock:
    """Time that tests set."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


@dataclass
class Rig:
    """The proxy side under test."""

    engine: FakeEngine
    server: FakeEngineServer
    clock: ManualClock
    runtime: Runtime
    gate: PoolGate
    app: FastAPI
    api: httpx.AsyncClient

    async def call(self, path: str, body: dict | bytes, headers: dict[str, str] | None = None) -> httpx.Response:
        """A request on a generating route, through the gate, as the relay would do it."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        request = relay_request(raw, sent, path)
        plan: Plan | Refusal | None = await self.gate.plan(request, lambda _: None) if self.gate.concerns(request) else None
        if isinstance(plan, Refusal):
            return httpx.Response(plan.status, content=plan.body, headers=list(plan.headers))
        try:
            return await self._forward(path, raw, sent, plan)
        finally:
            if plan is not None:
                plan.done()

    async def _forward(self, path: str, raw: bytes, sent: list[tuple[bytes, bytes]], plan: Plan | None) -> httpx.Response:
        extra = list(plan.engine_headers) if plan is not None else []
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(self.server.path), verify=False), timeout=30
        ) as client:
            reply = await client.post(f"http://engine{path}", content=raw, headers=[*sent, *extra])
        if plan is not None:
            added = plan.reply_headers(reply.status_code, [(n.lower(), v) for n, v in reply.headers.raw])
            reply.headers.update({name.decode(): value.decode() for name, value in added})
        return reply

    async def settle(self) -> None:
        """Until the engine's events have closed every book and every command has run."""
        async with asyncio.timeout(20):
            while any(book.done_ts is not None for book in self.runtime.hub.ledger.books):
                await asyncio.sleep(0.005)
            await self.runtime.hub.settle()

    async def until_linked(self, boot_id: str) -> None:
        """Until the runtime has seen this boot."""
        async with asyncio.timeout(20):
            while not (self.runtime.hub.linked and self.runtime.hub.boot_id == boot_id):
                self.runtime.link.poke()
                await asyncio.sleep(0.005)
            await self.runtime.hub.settle()

    async def until_unlinked(self) -> None:
        """Until the runtime has noticed that the engine is gone."""
        async with asyncio.timeout(20):
            while self.runtime.hub.linked:
                self.runtime.link.poke()
                await asyncio.sleep(0.005)

    async def pool(self, **body: object) -> dict:
        """Create a pool and expect it."""
        reply = await self.api.post("/polykv/pools", json=body)
        assert reply.status_code == 201, reply.text
        return reply.json()


def relay_request(body: bytes, headers: Sequence[tuple[bytes, bytes]] = (), path: str = "/completion") -> RelayRequest:
    """What the relay shows the gate."""
    return RelayRequest(b"POST", path.encode(), headers, body, names_of(headers))


async def steps(engine: FakeEngine, n: int) -> None:
    """Let a held engine take some steps."""
    for _ in range(n):
        before = engine.t_us
        engine.go()
        while engine.t_us == before:
            await asyncio.sleep(0)
        engine.hold()


@asynccontextmanager
async def served(engine: FakeEngine, folder: Path) -> AsyncIterator[FakeEngineServer]:
    """The fake engine on a socket."""
    server = FakeEngineServer(engine, folder / "engine.sock")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def rig(
    folder: Path,
    engine: FakeEngine | None = None,
    server: FakeEngineServer | None = None,
    *,
    clock: ManualClock | None = None,
    state_dir: Path | None = None,
    limits: LedgerLimits | None = None,
    keys: Keys | None = None,
    default_pool: str | None = None,
    declared: Sequence[Declared] = (),
    health: dict[str, object] | None = None,
    kv_disk_bytes: int = 0,
    admission: Limits | None = None,
    policy: Policy | None = None,
    hosts: LocalNames | None = None,
    client: Callable[..., EngineClient] = EngineClient,
) -> AsyncIterator[Rig]:
    """A running rig. With `server` given, its engine is used and left running. `health`: what the supervisor says."""
    if server is None:
        async with (
            served(engine or FakeEngine(), folder) as made,
            rig(
                folder,
                made.engine,
                made,
                clock=clock,
                state_dir=state_dir,
                limits=limits,
                keys=keys,
                default_pool=default_pool,
                declared=declared,
                health=health,
                kv_disk_bytes=kv_disk_bytes,
                admission=admission,
                policy=policy,
                hosts=hosts,
                client=client,
            ) as whole,
        ):
            yield whole
        return
    clock = clock or ManualClock()
    engine_client = client(EngineAddress(uds=str(server.path)), server.engine.key, api_key=server.engine.api_key)
    options = RuntimeOptions(
        state_dir=state_dir,
        limits=limits or LedgerLimits(),
        sweep_s=None,
        declared=declared,
        kv_disk_bytes=kv_disk_bytes,
        admission=admission or Limits(),
        policy=policy,
    )
    runtime = await Runtime.start(engine_client, options, clock)
    app = build_app(ApiContext(runtime, keys or Keys(), lambda: health or {}, default_pool=default_pool, hosts=hosts))
    add_page(app)
    api = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy", timeout=30)
    try:
        await asyncio.wait_for(runtime.link.known(), 20)
        await runtime.hub.settle()
        yield Rig(server.engine, server, clock, runtime, PoolGate(runtime, default_pool, keys), app, api)
    finally:
        await api.aclose()
        await runtime.stop()


@asynccontextmanager
async def relayed(proxy: Rig, *, gated: bool = True) -> AsyncIterator[tuple[Relay, httpx.AsyncClient]]:
    """The rig's relay on a port of its own, as clients meet it; without `gated` it asks nobody."""
    pool = UpstreamPool()
    pool.open(EngineAddress(uds=str(proxy.server.path)))
    relay = Relay(pool)
    relay.gate = proxy.gate if gated else None
    relay.additions = Additions(proxy.runtime) if gated else None
    http: Any = functools.partial(RelayProtocol, relay=relay)
    server = QuietServer(uvicorn.Config(proxy.app, http=http, log_config=None, lifespan="off", ws="none"))
    sock = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as client:
            yield relay, client
    finally:
        relay.cut("draining", "test over")
        server.should_exit = server.force_exit = True
        await task
        pool.drop_idle()


@asynccontextmanager
async def listening(app: FastAPI, path: Path) -> AsyncIterator[httpx.AsyncHTTPTransport]:
    """The API on a real socket, for clients that leave in the middle."""
    config = uvicorn.Config(app, uds=str(path), log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    server = QuietServer(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    transport = httpx.AsyncHTTPTransport(uds=str(path), verify=False)
    try:
        yield transport
    finally:
        await transport.aclose()
        server.should_exit = True
        await task
