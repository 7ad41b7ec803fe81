"""One fixture, two engines: the fake one, and (marked `engine`) the real one. The laws do not know which they are given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx
import pytest

from polykv_proxy.core.events import SlotEvent
from polykv_proxy.core.pools import SeqRef
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.engine.events import EngineEvents, StreamEvent
from polykv_proxy.engine.wire import Made, State
from polykv_proxy.ports import EngineAddress
from tests.engine.driver import KEY, Engine
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_server import FakeEngineServer
from tests.models import tiny_model

HANG_GUARD_S = 60
FIRST_REQ = count(1000)
NOBODY = 1
"""A session that never was."""


@dataclass
class Peer:
    """An engine under test, by its socket."""

    path: str
    key: str
    client: EngineClient
    real: bool
    events: list[StreamEvent] = field(default_factory=list)

    async def make(self, tokens: list[int], **more: object) -> Made:
        """Materialise, and expect it."""
        steps = [step async for step in self.client.make_seq({"tokens": tokens, **more})]
        assert isinstance(steps[-1], Made)
        return steps[-1]

    async def complete(
        self, prompt: object, headers: dict[str, object] | None = None, *, keyed: bool = True, **body: object
    ) -> httpx.Response:
        """A native completion with our headers."""
        sent = {name: str(value) for name, value in (headers or {}).items()}
        if keyed:
            sent["x-polykv-key"] = self.key
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=self.path), timeout=HANG_GUARD_S) as client:
            content = json.dumps({"prompt": prompt, "n_predict": 2, **body})
            return await client.post(
                "http://engine/completion", content=content, headers={"content-type": "application/json", **sent}
            )

    async def attach(self, prompt: list[int], seq: str, shared: int, **body: object) -> httpx.Response:
        """A completion that attaches."""
        headers = {"x-polykv-req": next(FIRST_REQ), "x-polykv-seq": seq, "x-polykv-shared": shared}
        return await self.complete(prompt, headers, **body)

    async def seen(self, req: int, n: int) -> list[SlotEvent]:
        """The events of a request, once there are `n`."""
        async with asyncio.timeout(HANG_GUARD_S):
            while len(found := [e for e in self.events if isinstance(e, SlotEvent) and e.req == req]) < n:
                await asyncio.sleep(0.01)
        return found

    async def listen(self) -> None:
        """Collect events for ever."""
        async for event in EngineEvents(self.client).listen():
            self.events.append(event)

    async def settled(self) -> State:
        """The state that shows every reply so far: a completion's may come before it, an operation's does not."""
        await self.client.end_session(NOBODY)
        return await self.client.state()

    async def idle(self) -> State:
        """The state that shows every reply so far, once all slots are idle."""
        state = await self.settled()
        async with asyncio.timeout(HANG_GUARD_S):
            while any(slot.state != "idle" for slot in state.slots):
                await asyncio.sleep(0.01)
                state = await self.client.state()
        return state

    async def clean(self) -> None:
        """Give everything back."""
        state = await self.settled()
        for seq in state.seqs:
            await self.client.free_seq(SeqRef.parse(seq.seq))
        for session in {slot.session for slot in state.slots} - {0}:
            await self.client.end_session(session)


@pytest.fixture(scope="module")
def layout() -> str:
    """The layout of the cache, an argument of the engine. A module may have another one."""
    return "--kv-unified"


@pytest.fixture(scope="module")
def real_engine(request: pytest.FixtureRequest, layout: str) -> Iterator[Engine]:
    with Engine(request.getfixturevalue("engine_path"), tiny_model("full"), ["-c", 4096, "-np", 4, "-t", 1, layout]) as engine:
        yield engine


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.engine)])
async def peer(request: pytest.FixtureRequest, layout: str, tmp_path: Path) -> AsyncIterator[Peer]:
    server: FakeEngineServer | None = None
    if request.param == "fake":
        server = FakeEngineServer(FakeEngine(unified=layout == "--kv-unified"), tmp_path / "engine.sock")
        await server.start()
        path, key = str(server.path), server.engine.key
    else:
        path, key = str(request.getfixturevalue("real_engine").socket), KEY
    client = EngineClient(EngineAddress(uds=path), key)
    made = Peer(path, key, client, server is None)
    listener = asyncio.ensure_future(made.listen())
    try:
        async with asyncio.timeout(HANG_GUARD_S):
            while not made.events:
                await asyncio.sleep(0.005)
        yield made
        await made.clean()
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
        await client.close()
        if server is not None:
            await server.stop()
