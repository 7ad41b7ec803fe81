"""Self-checks at intervals over the fake engine: whose turn it is, and that they are in nobody's way."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polykv_proxy.core.sessions import is_own
from polykv_proxy.runtime.self_check import QUIET_S, SelfCheck
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import Rig, relayed, rig, served

INTERVAL_S = 600
BASE = list(range(100, 140))


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Rig]:
    """Three pools, made a second after one another."""
    async with rig(tmp_path, FakeEngine(n_slots=2)) as made:
        for n in range(3):
            await made.pool(tokens=[n + 1, *BASE])
            made.clock.now += 1
        yield made


@pytest.fixture
def check(proxy: Rig) -> SelfCheck:
    hub = proxy.runtime.hub
    made = SelfCheck(hub, proxy.runtime.pools, proxy.runtime.verifier, INTERVAL_S)
    hub.on_wanted = made.give_way
    return made


async def verified(proxy: Rig) -> list[int]:
    """How often each pool was verified."""
    return [pool["n_verifies"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]]


async def test_pools_are_verified_one_a_turn_the_longest_not_verified_first(proxy: Rig, check: SelfCheck) -> None:
    """None before its time; then each once, in the order in which they were made; then again when the interval is over."""
    await check.tick()
    assert await verified(proxy) == [0, 0, 0]
    proxy.clock.now += INTERVAL_S - 1
    for expected in ([1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]):
        await check.tick()
        assert await verified(proxy) == expected
        proxy.clock.now += 1
    await proxy.api.post("/polykv/pools/2/verify")
    proxy.clock.now += INTERVAL_S - 2
    for expected in ([2, 2, 1], [2, 2, 2], [2, 2, 2]):
        await check.tick()
        assert await verified(proxy) == expected
    assert (await proxy.api.get("/polykv/pools/1")).json()["verify_verdict"] == "ok"


async def test_a_wrong_pool_is_found_and_replaced(proxy: Rig, check: SelfCheck) -> None:
    """As when somebody had asked."""
    seq = next(iter(proxy.engine.seqs.values()))
    proxy.engine.kv.corrupt(seq.cells[20])
    proxy.clock.now += INTERVAL_S
    await check.tick()
    shown = (await proxy.api.get("/polykv/pools/1")).json()
    assert (shown["n_mismatches"], shown["verify_verdict"], shown["residency"]) == (1, "mismatch", "resident")


async def test_nothing_is_begun_while_somebody_may_want_the_engine(proxy: Rig, check: SelfCheck) -> None:
    """1. a request was made a moment ago; 2. one runs, known to us or not; 3. every slot holds a session; 4. it is away."""
    proxy.clock.now += INTERVAL_S
    check.give_way()
    await check.tick()
    proxy.clock.now += QUIET_S
    for slot in proxy.engine.slots:
        slot.session = 5
    await check.tick()
    proxy.engine.slots[0].session, proxy.engine.slots[1].state = 0, "generating"
    await check.tick()
    proxy.engine.slots[1].state = "idle"
    book = asyncio.ensure_future(proxy.call("/completion", {"prompt": [1, *BASE, 5], "pool_id": 1, "n_predict": 2000}))
    while not len(proxy.runtime.hub.ledger.books):
        await asyncio.sleep(0)
    await check.tick()
    await book
    await proxy.settle()
    proxy.engine.fail_next("state", EngineFaultError(503, "unavailable_error", "no"))
    await check.tick()
    assert await verified(proxy) == [0, 0, 0]
    await check.tick()
    assert await verified(proxy) == [1, 0, 0]


async def _begun(proxy: Rig, check: SelfCheck) -> asyncio.Task[None]:
    """A turn in the middle of its work; the engine stands still."""
    proxy.clock.now += INTERVAL_S
    turn = asyncio.create_task(check.tick())
    async with asyncio.timeout(20):
        while not any(is_own(slot.session) and slot.state != "idle" for slot in proxy.engine.slots):
            await asyncio.sleep(0)
    proxy.engine.hold()
    return turn


async def _gone(proxy: Rig) -> None:
    async with asyncio.timeout(20):
        while any(is_own(slot.session) or slot.state != "idle" for slot in proxy.engine.slots):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/embeddings"])
async def test_the_first_request_of_a_user_ends_it_at_once(proxy: Rig, check: SelfCheck, path: str) -> None:
    """Any request that may make the engine work, also one that names no pool and one that cannot have one; a look does not."""
    async with relayed(proxy) as (relay, client):
        relay.on_post = proxy.runtime.hub.on_wanted
        turn = await _begun(proxy, check)
        await client.get("/slots")
        await client.get("/polykv/pools")
        assert not turn.done()
        asked = asyncio.create_task(client.post(path, json={"prompt": [5, 6], "messages": [{"role": "user", "content": "x"}]}))
        await asyncio.wait_for(turn, 20)
        proxy.engine.go()
        await asked
        await _gone(proxy)
    assert await verified(proxy) == [0, 0, 0]
    await check.tick()
    assert await verified(proxy) == [0, 0, 0]
    proxy.clock.now += QUIET_S
    await check.tick()
    assert await verified(proxy) == [1, 0, 0]


async def test_a_pool_that_is_to_be_made_ends_it_too(proxy: Rig, check: SelfCheck) -> None:
    """It is made in a slot like any request."""
    turn = await _begun(proxy, check)
    making = asyncio.create_task(proxy.pool(tokens=[9, *BASE]))
    await asyncio.wait_for(turn, 20)
    proxy.engine.go()
    await making
    await _gone(proxy)
    assert await verified(proxy) == [0, 0, 0, 0]


async def test_who_waits_for_the_same_check_keeps_it(proxy: Rig, check: SelfCheck) -> None:
    """A caller who joined gets the verdict although a request has come."""
    turn = await _begun(proxy, check)
    asked = asyncio.create_task(proxy.api.post("/polykv/pools/1/verify"))
    while proxy.runtime.verifier._flights[1]._waiters < 2:
        await asyncio.sleep(0)
    check.give_way()
    await asyncio.wait_for(turn, 20)
    proxy.engine.go()
    assert (await asked).json()["verdict"] == "ok"
    assert await verified(proxy) == [1, 0, 0]


async def test_a_check_asked_for_while_another_is_being_stopped_begins_anew(proxy: Rig, check: SelfCheck) -> None:
    """It does not share the end of the one that gave way."""
    turn = await _begun(proxy, check)
    check.give_way()
    await asyncio.sleep(0)
    asked = asyncio.create_task(proxy.api.post("/polykv/pools/1/verify"))
    await asyncio.wait_for(turn, 20)
    proxy.engine.go()
    assert (await asked).json()["verdict"] == "ok"


async def test_a_proxy_that_stops_leaves_nothing_of_a_check(tmp_path: Path) -> None:
    """Not in the engine either, which goes on without it."""
    async with served(FakeEngine(), tmp_path) as server:
        async with rig(tmp_path, server=server) as proxy:
            await proxy.pool(tokens=BASE)
            check = SelfCheck(proxy.runtime.hub, proxy.runtime.pools, proxy.runtime.verifier, INTERVAL_S)
            turn = await _begun(proxy, check)
        server.engine.go()
        await _gone(proxy)
        await turn


async def test_one_that_cannot_be_verified_does_not_stand_in_the_way_of_others(proxy: Rig, check: SelfCheck) -> None:
    """It has had its turn: inconclusive, or an error; the others have theirs."""
    proxy.clock.now += INTERVAL_S
    for message in ("broken", "broken again"):
        proxy.engine.fail_next("complete", EngineFaultError(500, "server_error", message))
    for expected in ([1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]):
        await check.tick()
        assert await verified(proxy) == expected
