"""F028: a request that goes away between "pool found" and "attached" must not hold the pool for ever."""

import asyncio
from pathlib import Path

import pytest

from polykv_proxy.ports import Plan
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import Rig, relay_request, rig

SYSTEM = "You are a careful agent with many tools and a long memory"
ASK = {"prompt": SYSTEM + " x", "n_predict": 2, "pool_id": 1, "session_id": "s"}


async def released(proxy: Rig) -> None:
    """Nothing holds the pool any more: no book, and once the session is ended evict and release succeed at once."""
    proxy.engine.go()
    async with asyncio.timeout(30):
        while len(proxy.runtime.hub.ledger.books):
            proxy.clock.now += 6
            await proxy.runtime.sweep()
            await asyncio.sleep(0.005)
    session = proxy.runtime.hub.ledger.sessions.get("s")
    assert session is None or (session.n_streams, session.n_active) == (0, 0)
    assert (await proxy.api.delete("/polykv/sessions/s")).status_code in {200, 404}
    assert (await proxy.api.post("/polykv/pools/1/evict")).status_code == 200
    reply = await proxy.api.delete("/polykv/pools/1")
    assert (reply.status_code, reply.json()["released"]) == (200, True)
    async with asyncio.timeout(30):
        while proxy.engine.seqs:  # what the engine had read before its caller left is made, and swept away
            await proxy.runtime.sweep()
            await proxy.runtime.hub.settle()
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
async def test_leaving_at_any_moment_leaves_no_reference(tmp_path: Path, turns: int) -> None:
    """Clients that leave after any number of turns of the loop, while the engine stands still, leave nothing behind."""
    async with rig(tmp_path, FakeEngine(n_slots=1)) as proxy:
        await proxy.pool(prompt=SYSTEM)
        proxy.engine.hold()
        calls = [asyncio.ensure_future(proxy.call("/completion", ASK)) for _ in range(5)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await released(proxy)


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 13, 34])
async def test_leaving_while_a_pool_is_rebuilt_leaves_no_reference(tmp_path: Path, turns: int) -> None:
    """The same while the pool is being made again."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        await proxy.engine.sleep_and_wake()
        await proxy.until_linked(proxy.engine.boot_id)
        proxy.engine.hold()
        calls = [asyncio.ensure_future(proxy.call("/completion", ASK)) for _ in range(5)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        proxy.engine.go()
        async with asyncio.timeout(30):
            while proxy.runtime.pools.flight(1) is not None:
                await asyncio.sleep(0.005)
        while proxy.engine.seqs:
            await proxy.runtime.sweep()
            await proxy.runtime.hub.settle()
        await released(proxy)


async def test_an_engine_that_refuses_or_is_gone_leaves_no_reference(tmp_path: Path) -> None:
    """The proxy's own call fails: an error answer closes the book at once, a refused connection after the state was read."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        proxy.engine.fail_next("complete", EngineFaultError(500, "server_error", "broken"))
        assert (await proxy.call("/completion", ASK)).status_code == 500
        request = relay_request(b'{"prompt":"x","pool_id":1}')
        plan = await proxy.gate.plan(request, lambda _: None)
        assert isinstance(plan, Plan)
        plan.done()
        assert len(proxy.runtime.hub.ledger.books) == 1
        await released(proxy)
