"""Idle pools give way to requests for which the engine has no cells left, also to those that name no pool."""

import asyncio
from pathlib import Path

import httpx

from polykv_proxy.core.ledger import LedgerLimits
from polykv_proxy.core.tally import Evicted
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import Rig, rig

NO_GRACE = LedgerLimits(pool_grace_s=0)
LEFT, RIGHT = list(range(100, 200)), list(range(300, 400))


def small() -> FakeEngine:
    """256 cells."""
    return FakeEngine(n_slots=2, n_ctx=256)


async def ask(proxy: Rig, prompt: list[int], **body: object) -> httpx.Response:
    reply = await proxy.call("/completion", {"prompt": prompt, "n_predict": 1, **body})
    await proxy.settle()
    return reply


async def shown(proxy: Rig) -> list[tuple[str, str | None]]:
    pools = (await proxy.api.get("/polykv/pools")).json()["pools"]
    return [(pool["residency"], pool["reason"]) for pool in pools]


async def given_up(proxy: Rig, n: int) -> None:
    async with asyncio.timeout(20):
        while proxy.runtime.hub.tally.evictions[Evicted.ENGINE] < n:
            await asyncio.sleep(0.005)


async def test_a_plain_request_is_served_in_the_place_of_an_idle_pool(tmp_path: Path) -> None:
    """Nothing goes while there is room; then the pool idle for longer, which says why and comes back with its next request."""
    async with rig(tmp_path, small(), limits=NO_GRACE) as proxy:
        await proxy.pool(tokens=LEFT)
        proxy.clock.now += 10
        await proxy.pool(tokens=RIGHT)
        await proxy.runtime.sweep()
        assert (await ask(proxy, list(range(500, 530)))).status_code == 200
        assert await shown(proxy) == [("resident", None), ("resident", None)]
        assert (await ask(proxy, list(range(500, 620)))).status_code == 200
        await given_up(proxy, 1)
        assert await shown(proxy) == [("evicted", "the engine had no cells left for a request"), ("resident", None)]
        assert (await ask(proxy, [*LEFT, 7], pool_id=1)).json()["opencoti"]["rebuilt"] is True


async def test_what_is_kept_is_not_on_the_list(tmp_path: Path) -> None:
    """Pinned pools, those of attached sessions and their parents, and all in their grace stay; the request is refused."""
    async with rig(tmp_path, small()) as proxy:
        await proxy.pool(tokens=LEFT)
        await proxy.api.post("/polykv/pools/1/fork", json={"tokens": [*LEFT, 7]})
        await proxy.pool(tokens=RIGHT)
        await proxy.api.post("/polykv/pools/3/pin")
        assert (await ask(proxy, [*LEFT, 7, 8], pool_id=2, session_id="s")).status_code == 200
        proxy.clock.now += 100
        await proxy.runtime.sweep()
        assert proxy.engine.expendable == []
        await proxy.api.delete("/polykv/sessions/s")
        await proxy.api.post("/polykv/pools/3/unpin")
        await proxy.runtime.sweep()
        assert proxy.engine.expendable == ["4.1"]
        proxy.clock.now += 100
        await proxy.runtime.sweep()
        listed = proxy.engine.expendable
        assert (sorted(listed), listed.index("3.1") < listed.index("2.1")) == (["2.1", "3.1", "4.1"], True)


async def test_a_pool_that_is_used_comes_off_the_list_at_once(tmp_path: Path) -> None:
    """Without waiting for a sweep."""
    async with rig(tmp_path, small(), limits=NO_GRACE) as proxy:
        await proxy.pool(tokens=LEFT)
        await proxy.runtime.sweep()
        assert len(proxy.engine.expendable) == 1
        proxy.engine.hold()
        call = asyncio.ensure_future(proxy.call("/completion", {"prompt": [*LEFT, 7], "pool_id": 1, "n_predict": 1}))
        async with asyncio.timeout(20):
            while proxy.engine.expendable:
                await asyncio.sleep(0.005)
        proxy.engine.go()
        assert (await call).status_code == 200


async def test_a_list_that_was_not_taken_is_told_again_and_so_is_a_new_boot(tmp_path: Path) -> None:
    """An engine that refuses it, or is another now, gets it with the next sweep; one that knows it is left alone."""
    async with rig(tmp_path, small(), limits=NO_GRACE) as proxy:
        await proxy.pool(tokens=LEFT)
        proxy.engine.fail_next("expendable", EngineFaultError(500, "server_error", "broken"))
        await proxy.runtime.sweep()
        assert proxy.engine.expendable == []
        await proxy.runtime.sweep()
        assert len(proxy.engine.expendable) == 1
        proxy.engine.fail_next("expendable", EngineFaultError(500, "server_error", "not asked"))
        await proxy.runtime.sweep()
        assert proxy.engine.faults["expendable"]
        proxy.engine.faults.clear()
        await proxy.engine.sleep_and_wake()
        await proxy.until_linked(proxy.engine.boot_id)
        await proxy.pool(tokens=RIGHT)
        await proxy.runtime.sweep()
        assert len(proxy.engine.expendable) == 1
