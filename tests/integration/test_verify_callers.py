"""Who asks for self-checks of pools, and leaves: over the fake engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from polykv_proxy.core.sessions import is_own
from tests.integration.rig import Rig, listening
from tests.integration.verify_rig import corrupt, family, shown, verify


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Rig]:
    async with family(tmp_path) as made:
        yield made


async def test_two_at_once_are_one(proxy: Rig) -> None:
    """The second caller gets the answer of the first one's work; two pools are looked at one after the other."""
    proxy.engine.computed = 0
    one, two, other = await asyncio.gather(verify(proxy, 2), verify(proxy, 2), verify(proxy, 5))
    assert one == two
    assert (await shown(proxy, 2))["n_verifies"] == 1
    assert proxy.engine.computed == one["n_tokens_computed"] + other["n_tokens_computed"]


@asynccontextmanager
async def _held(proxy: Rig, n_calls: int) -> AsyncIterator[None]:
    """Inside, the engine stands still, in the middle of the check's own requests."""
    calls = len(proxy.server.calls)
    async with asyncio.timeout(20):
        while len(proxy.server.calls) < calls + n_calls or all(slot.state == "idle" for slot in proxy.engine.slots):
            await asyncio.sleep(0)
    proxy.engine.hold()
    yield
    proxy.engine.go()


@pytest.mark.parametrize("n_calls", [1, 10, 40])
async def test_a_caller_that_leaves_ends_the_work_and_nothing_is_left(proxy: Rig, tmp_path: Path, n_calls: int) -> None:
    """In whatever part of it: no session, no cell, no book; the next check is not hindered."""
    used = proxy.engine.used_cells()
    async with listening(proxy.app, tmp_path / "public.sock") as transport:
        client = httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=30)
        asking = asyncio.ensure_future(client.post("/polykv/pools/2/verify", json={"n_positions": 40}))
        async with _held(proxy, n_calls):
            asking.cancel()
            await client.aclose()
        async with asyncio.timeout(20):
            while any(slot.state != "idle" or is_own(slot.session) for slot in proxy.engine.slots):
                await asyncio.sleep(0.005)
        await proxy.runtime.hub.settle()
    assert proxy.engine.used_cells() == used
    assert (await shown(proxy, 2))["n_verifies"] == 0
    assert (await verify(proxy, 2))["verdict"] == "ok"


async def test_a_caller_that_leaves_does_not_stop_the_replacement(proxy: Rig, tmp_path: Path) -> None:
    """What was found wrong is made anew although nobody waits for the verdict, which stands in the record."""
    corrupt(proxy, 2, 45)
    tree = proxy.runtime.hub.ledger.tree
    async with listening(proxy.app, tmp_path / "public.sock") as transport:
        client = httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=30)
        asking = asyncio.ensure_future(client.post("/polykv/pools/2/verify"))
        async with asyncio.timeout(20):
            while (pool := tree.get(2)) is not None and pool.residency.value != "quarantined":
                await asyncio.sleep(0)
        asking.cancel()
        await client.aclose()
        async with asyncio.timeout(20):
            while (await shown(proxy, 2))["n_mismatches"] == 0:
                await asyncio.sleep(0.005)
    assert [(await shown(proxy, pool))["residency"] for pool in (2, 3)] == ["resident", "resident"]
    assert (await verify(proxy, 3))["verdict"] == "ok"


async def test_a_caller_that_leaves_does_not_end_another_s_check(proxy: Rig, tmp_path: Path) -> None:
    """The one who stays gets the verdict."""
    async with listening(proxy.app, tmp_path / "public.sock") as transport:
        client = httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=30)
        asking = asyncio.ensure_future(client.post("/polykv/pools/2/verify"))
        async with _held(proxy, 1):
            staying = asyncio.ensure_future(verify(proxy, 2))
            await asyncio.sleep(0.02)
            asking.cancel()
            await client.aclose()
        assert (await staying)["verdict"] == "ok"
