"""A proxy over an engine whose cache is split: what it says of streams, who owns what, and which pools give way."""

from pathlib import Path

import pytest

from polykv_proxy.runtime import room
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import rig

BASE = list(range(100, 140))


async def test_streams_are_counted(tmp_path: Path) -> None:
    """One for each slot and pool id; those that hold something are not free. On a unified cache there is nothing to say."""
    async with rig(tmp_path, FakeEngine(max_pools=3, n_slots=2, n_ctx=512, unified=False)) as proxy:
        await proxy.pool(tokens=BASE)
        await proxy.call("/completion", {"prompt": [*BASE, 5], "pool_id": 1, "session_id": "a", "n_predict": 2})
        await proxy.settle()
        shown = (await proxy.api.get("/polykv/capacity")).json()
        streams = (shown["kv_streams_total"], shown["kv_streams_free"], shown["kv_cells_per_stream"])
        assert (streams, shown["cells_total"]) == ((5, 3, 512), 5 * 512)
    async with rig(tmp_path, FakeEngine()) as proxy:
        shown = (await proxy.api.get("/polykv/capacity")).json()
        assert {shown[key] for key in ("kv_streams_total", "kv_streams_free", "kv_cells_per_stream")} == {None}


async def test_everybody_owns_what_they_hold(tmp_path: Path) -> None:
    """A fork shares nothing with its parent, a session nothing with its pool."""
    async with rig(tmp_path, FakeEngine(unified=False)) as proxy:
        await proxy.pool(tokens=BASE)
        fork = (await proxy.api.post("/polykv/pools/1/fork", json={"tokens": [*BASE, 5, 6]})).json()
        await proxy.call("/completion", {"prompt": [*BASE, 5, 6, 7], "pool_id": 2, "session_id": "a", "n_predict": 2})
        await proxy.settle()
        shown = (await proxy.api.get("/polykv/pools")).json()
        assert (fork["n_shared"], fork["branch_pos"]) == (0, 40)
        assert [pool["own_kv_bytes"] for pool in shown["pools"]] == [4000, 4200]
        assert shown["pools"][1]["sessions"][0]["marginal_kv_bytes"] == 4500
        assert shown["kv_bytes"] == 4000 + 4200 + 4500


async def test_a_full_stream_of_one_evicts_nothing_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long pools fill nearly all cells of their streams: none of them gives way until a pool needs its id."""
    engine = FakeEngine(max_pools=3, n_slots=1, n_ctx=64, unified=False)
    async with rig(tmp_path, engine) as proxy:
        proxy.clock.now += 100
        for n in range(3):
            await proxy.pool(tokens=[*range(100 + n, 163 + n)])
        monkeypatch.setattr(room, "LOW_CELLS", 0.99)
        await proxy.runtime.pools.maker.room.relieve()
        assert len(engine.seqs) == 3
        proxy.clock.now += 100
        await proxy.pool(tokens=BASE)
        residencies = [pool["residency"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]]
        assert residencies.count("resident") == 3
