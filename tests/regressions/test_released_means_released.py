"""A pool that was released never comes back into the journal: its name is free, and no later start finds it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from polykv_proxy.core.commands import SavePool
from polykv_proxy.runtime.journal import Journal
from tests.integration.rig import rig


async def test_a_sweep_does_not_write_a_releasing_pool(tmp_path: Path) -> None:
    """Its last request runs on, its time of last use changes, and yet its row stays gone."""
    async with rig(tmp_path, state_dir=tmp_path / "state") as proxy:
        await proxy.pool(prompt="the first text", name="p", ttl_s=60.0)
        proxy.engine.hold()
        call = asyncio.ensure_future(proxy.call("/completion", {"prompt": "the first text, and more", "pool_id": "p"}))
        async with asyncio.timeout(20):
            while all(slot.state == "idle" for slot in proxy.engine.slots):
                await asyncio.sleep(0.005)
        assert (await proxy.api.delete("/polykv/pools/p")).status_code == 202
        await proxy.runtime.sweep()
        proxy.engine.go()
        await call
        await proxy.settle()
        assert (await proxy.pool(prompt="another text", name="p"))["pool_id"] == 2
    assert await _journalled(tmp_path / "state") == [2]


async def test_a_write_that_was_due_finds_the_pool_releasing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that was decided before the release and comes to its turn behind it is not written."""
    async with rig(tmp_path, state_dir=tmp_path / "state") as proxy:
        await proxy.pool(prompt="the first text", name="p")
        hub = proxy.runtime.hub
        drop = hub.journal.drop_pools

        async def dropped(pool_ids: Sequence[int]) -> None:
            await drop(pool_ids)
            hub.post([SavePool(pool_id) for pool_id in pool_ids])
            await hub.settle()

        monkeypatch.setattr(hub.journal, "drop_pools", dropped)
        assert (await proxy.api.delete("/polykv/pools/p")).status_code == 200
        assert (await proxy.api.post("/polykv/pools", json={"prompt": "another text", "name": "p"})).status_code == 201
    assert await _journalled(tmp_path / "state") == [2]


async def test_a_pool_that_is_not_there_yet_is_not_written(tmp_path: Path) -> None:
    """A pin on a pool that is being made, and then fails, leaves no row that would bring it to life at the next start."""
    async with rig(tmp_path, state_dir=tmp_path / "state") as proxy:
        proxy.engine.hold()
        assert (await proxy.api.post("/polykv/pools?wait=0", json={"prompt": "a text", "name": "p"})).status_code == 202
        assert (await proxy.api.post("/polykv/pools/p/pin", json={})).status_code == 200
        async with asyncio.timeout(20):
            while ("POST", "/_polykv/v1/seqs") not in proxy.server.calls:
                await asyncio.sleep(0.005)
        await proxy.server.crash()
        await proxy.until_unlinked()
        proxy.engine.go()
        async with asyncio.timeout(20):
            while (await proxy.api.get("/polykv/pools/p")).json().get("residency") == "materializing":
                await asyncio.sleep(0.005)
        await proxy.server.restart()
        await proxy.until_linked(proxy.engine.boot_id)
        assert (await proxy.api.post("/polykv/pools", json={"prompt": "another text", "name": "p"})).status_code == 201
        assert (await proxy.api.post("/polykv/pools/p/pin", json={})).status_code == 200
    assert await _journalled(tmp_path / "state") == [2]


async def _journalled(folder: Path) -> list[int]:
    journal = Journal(folder / "journal.sqlite")
    try:
        return [pool.pool_id for pool, _ in (await journal.open(0)).pools]
    finally:
        await journal.close()
