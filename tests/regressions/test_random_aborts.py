"""Thousands of clients go away at random moments of random requests: in the end every book is at zero and nothing has grown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import socket
import struct
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from polykv_proxy.api.relay import Relay
from polykv_proxy.core.admission.gate import Limits
from polykv_proxy.core.ledger import LedgerLimits
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, relayed, rig
from tests.lengths import length

N_ABORTS = length(500, 10_000)
AT_ONCE = 20
GROWTH = 0.02
"""Of the number of objects, from half way to the end."""
POOLS = {"a": "a careful agent with many tools", "b": "a careful agent with a long memory", "c": "somebody else"}
KEPT = 16
"""Descriptors of connections at rest that the proxy keeps for its own calls to the engine, both ends."""
ROUTES = ("/completion", "/v1/chat/completions", "/v1/embeddings", "/slots", "/polykv/pools", "/polykv/tps", "/polykv/match")


class Leaver:
    """Sends one random request and goes away at a random moment of it, by close or by reset."""

    def __init__(self, url: str, dice: random.Random) -> None:
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port
        self.dice = dice

    def request(self) -> bytes:
        dice, path = self.dice, self.dice.choice(ROUTES)
        if path in {"/slots", "/polykv/tps"}:
            return f"GET {path} HTTP/1.1\r\nHost: t\r\n\r\n".encode()
        name = dice.choice(sorted(POOLS))
        text = POOLS[name] + " " + " ".join(dice.choices(("one", "two", "three", "four"), k=dice.randrange(1, 9)))
        if path == "/polykv/pools":
            body: dict[str, object] = {"prompt": text}
        elif path == "/v1/chat/completions":
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": dice.randrange(1, 30)}
        else:
            body = {"prompt": text, "input": text, "n_predict": dice.randrange(1, 30)}
        if path in {"/completion", "/v1/chat/completions"}:
            body |= {"stream": dice.random() < 0.5} | ({"pool_id": name} if dice.random() < 0.7 else {})
            body |= {"session_id": f"s{dice.randrange(6)}"} if dice.random() < 0.5 else {}
        raw = json.dumps(body).encode()
        return f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw

    async def leave(self) -> None:
        dice, sent = self.dice, self.request()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        moment = dice.choice(("in the request", "after turns", "after the head", "in the reply", "two in a row"))
        writer.write(sent[: dice.randrange(len(sent))] if moment == "in the request" else sent)
        if moment == "two in a row":
            writer.write(self.request())
        await writer.drain()
        with contextlib.suppress(asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(0.5):  # some of them wait for others that have left
                if moment == "after turns":
                    for _ in range(dice.randrange(60)):
                        await asyncio.sleep(0)
                elif moment in {"after the head", "in the reply"}:
                    await reader.readuntil(b"\r\n\r\n")
                    if moment == "in the reply":
                        await reader.read(dice.randrange(1, 2000))
        if dice.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class World:
    """What is counted of a proxy and its engine, which live in this process."""

    def __init__(self, proxy: Rig, relay: Relay, client: httpx.AsyncClient) -> None:
        self.proxy, self.relay, self.client = proxy, relay, client

    async def quiet(self) -> None:
        """Time goes by until nothing of what was left is going on."""
        proxy, gate = self.proxy, self.proxy.runtime.admission.gate
        async with asyncio.timeout(60):
            while True:
                proxy.clock.now += 2
                await proxy.runtime.sweep()
                await proxy.runtime.hub.settle()
                busy = [slot for slot in proxy.engine.slots if slot.state != "idle"]
                if not (self.relay.running or len(proxy.runtime.hub.ledger.books) or busy or len(gate.lines)):
                    return
                await asyncio.sleep(0.01)

    async def emptied(self) -> None:
        """Sessions ended, pools but the named ones released."""
        proxy = self.proxy
        for session in (await proxy.api.get("/polykv/sessions")).json()["sessions"]:
            if session["session_id"]:
                await proxy.api.delete(f"/polykv/sessions/{session['session_id']}")
        for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]:
            if pool["name"] is None:
                assert (await proxy.api.delete(f"/polykv/pools/{pool['pool_id']}")).status_code in {200, 202}
        await self.quiet()
        for slot in proxy.engine.slots:
            slot.clear()

    async def counts(self) -> dict[str, int]:
        """Descriptors and tasks, once the relay's connections at rest are closed and both sides know of it."""
        self.relay.pool.drop_idle()
        await self.client.aclose()
        n_files, n_same = -1, 0
        while n_same < 20:
            await asyncio.sleep(0.01)
            n_files, before = len(os.listdir("/proc/self/fd")), n_files
            n_same = n_same + 1 if n_files == before else 0
        return {"files": n_files, "tasks": len(asyncio.all_tasks())}

    def books(self) -> dict[str, int]:
        """All that is held for somebody."""
        proxy, hub, gate = self.proxy, self.proxy.runtime.hub, self.proxy.runtime.admission.gate
        return {
            "books": len(hub.ledger.books),
            "sessions": len(hub.ledger.sessions),
            "reservations": len(gate.outlook.reservations),
            "waiting": len(gate.lines),
            "running": len(self.relay.running),
            "slots": sum(slot.state != "idle" or slot.session != 0 for slot in proxy.engine.slots),
            "sequences": len(proxy.engine.seqs) - sum(pool.seq is not None for pool in hub.ledger.tree),
            "streams": len(hub.telemetry.throughput._streams),
        }


async def aborts(url: str, n: int, dice: random.Random) -> None:
    """So many, a few at a time."""
    for _ in range(0, n, AT_ONCE):
        await asyncio.gather(*(Leaver(url, dice).leave() for _ in range(AT_ONCE)))


@pytest.mark.timeout(1800)
async def test_all_books_are_at_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Slots, sessions, reservations, places in a line, sequences; descriptors and tasks as before; objects as many as half way."""
    engine, dice = FakeEngine(n_slots=4, max_pools=6, n_ctx=2048), random.Random(20)
    options = {"admission": Limits(max_running=6, max_queued=8), "limits": LedgerLimits(pool_grace_s=0)}
    async with rig(tmp_path, engine, **options) as proxy, relayed(proxy) as (relay, client):  # type: ignore[arg-type]
        world, url = World(proxy, relay, client), str(client.base_url)
        for name, text in POOLS.items():
            await proxy.pool(prompt=text, name=name)
        await aborts(url, AT_ONCE, dice)  # what is made once is there
        await world.quiet()
        await world.emptied()
        before, objects = await world.counts(), []
        for _ in range(2):
            await aborts(url, N_ABORTS // 2, dice)
            await world.quiet()
            await world.emptied()
            assert world.books() == dict.fromkeys(world.books(), 0)
            after = await world.counts()
            assert after["tasks"] == before["tasks"]
            assert after["files"] <= before["files"] + KEPT
            proxy.server.calls.clear()  # what the fake remembers, and pytest of the log
            proxy.server.seen_bodies.clear()
            caplog.clear()
            gc.collect()
            objects.append(Counter(type(one).__name__ for one in gc.get_objects()))
        grown = objects[1] - objects[0]
        assert grown.total() < GROWTH * objects[0].total(), grown.most_common(10)
        capacity = (await proxy.api.get("/polykv/capacity")).json()
        assert [capacity[key] for key in ("slots_busy", "n_requests", "n_sessions", "n_pools")] == [0, 0, 0, len(POOLS)]
        assert capacity["seq_ids_used"] == len(engine.seqs)
        for name in POOLS:
            assert (await proxy.api.delete(f"/polykv/pools/{name}")).status_code == 200
        await world.quiet()
        assert (engine.seqs, engine.used_cells()) == ({}, 0)
