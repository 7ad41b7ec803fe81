"""KV on disk over the fake engine: what is saved when, and what comes back how."""

import asyncio
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from polykv_proxy.core.tally import Rebuilt
from tests.fakes.fake_engine import FakeEngine
from tests.integration.vault_rig import (
    BASE,
    CHILD,
    GRANDCHILD,
    LIMIT,
    chain,
    disk,
    files,
    residencies,
    shown,
    until_saving,
    use,
    vault,
    verb,
)

# -- saved and restored -------------------------------------------------------------------------------------------------------


async def test_what_is_evicted_is_saved_and_comes_back_without_being_computed(tmp_path: Path) -> None:
    """The file is private and counted; the next request reads it and says so; a second eviction has nothing to write."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        assert (await verb(proxy, 1, "evict"))[1]["evicted"] is True
        told = await shown(proxy, 1)
        assert (told["residency"], told["own_kv_bytes"], proxy.engine.used_cells()) == ("saved", 0, 0)
        assert files(tmp_path) == {"1.kv": told["saved_bytes"]}
        kv = tmp_path / "state" / "kv"
        assert [stat.S_IMODE(path.stat().st_mode) for path in (kv, kv / "1.kv", kv.parent)] == [0o700, 0o600, 0o700]
        reply = await use(proxy, 1, [*BASE, 1])
        assert (reply["cached_prefix_tokens"], reply["computed"], reply.get("restored"), reply.get("rebuilt")) == (
            40,
            1,
            True,
            None,
        )
        told = await shown(proxy, 1)
        assert (told["residency"], told["n_restores"], told["n_rebuilds"], told["n_hits"]) == ("resident", 1, 0, 1)
        assert told["saved_bytes"] == files(tmp_path)["1.kv"]
        assert proxy.runtime.hub.tally.rebuilds == {Rebuilt.RESTORED: 1}
        await verb(proxy, 1, "evict")
        assert (await residencies(proxy))[1] == "saved"
        assert (await disk(proxy)) == {
            "on": True,
            "bytes_used": told["saved_bytes"],
            "bytes_max": LIMIT,
            "n_copies": 1,
            "paused": None,
            "n_saves": 1,
            "n_restores": 1,
            "n_refused": 0,
        }


async def test_a_chain_comes_back_parents_first_and_computes_nothing(tmp_path: Path) -> None:
    """Each file holds its own range; the tree takes the cells that it took before."""
    async with vault(tmp_path) as proxy:
        await chain(proxy)
        used = proxy.engine.used_cells()
        assert (await verb(proxy, 1, "flush"))[1]["evicted"] == [3, 2, 1]
        assert await residencies(proxy) == {1: "saved", 2: "saved", 3: "saved"}
        sizes = files(tmp_path)
        assert sizes["3.kv"] < sizes["2.kv"] < sizes["1.kv"] or sizes["3.kv"] < sizes["1.kv"]
        assert (await use(proxy, 3, [*GRANDCHILD, 1]))["computed"] == 1
        assert await residencies(proxy) == {1: "resident", 2: "resident", 3: "resident"}
        assert [(await shown(proxy, pool))["n_shared"] for pool in (1, 2, 3)] == [0, 40, 42]
        for slot in proxy.engine.slots:
            slot.clear()
        assert proxy.engine.used_cells() == used


async def test_a_part_whose_parent_has_no_copy_waits_for_the_parent_to_be_computed(tmp_path: Path) -> None:
    """Only the parent's tokens are computed, the child's are read."""
    async with vault(tmp_path) as proxy:
        await chain(proxy)
        await verb(proxy, 1, "flush")
        await proxy.runtime.vault.forget(1)
        assert await residencies(proxy) == {1: "evicted", 2: "saved", 3: "saved"}
        reply = await use(proxy, 2, [*CHILD, 1])
        assert (reply["cached_prefix_tokens"], reply["computed"]) == (42, 40 + 1)


async def test_a_part_whose_parent_cannot_be_brought_is_computed(tmp_path: Path) -> None:
    """With room for one pool only, the child is computed on its own, and its copy stays for better times."""
    async with vault(tmp_path, FakeEngine(max_pools=2)) as proxy:
        await proxy.pool(tokens=BASE)
        await proxy.api.post("/polykv/pools/1/fork", json={"tokens": CHILD})
        await verb(proxy, 1, "flush")
        await proxy.pool(tokens=[60, 61])
        assert (await verb(proxy, 3, "pin"))[0] == 200
        assert (await use(proxy, 2, [*CHILD, 1]))["computed"] == 42 + 1
        assert sorted(files(tmp_path)) == ["1.kv", "2.kv"]


@pytest.mark.parametrize("kind", ["checkpoint", "split"])
async def test_what_cannot_be_cut_is_saved_whole(tmp_path: Path, kind: str) -> None:
    """Windows and states, and split caches: children's files begin at 0 and need no parent."""
    engine = FakeEngine(unified=kind != "split")
    engine.prefix_sharing = "checkpoint" if kind == "checkpoint" else "any"
    async with vault(tmp_path, engine) as proxy:
        await chain(proxy)
        await verb(proxy, 1, "flush")
        await proxy.runtime.vault.forget(1)
        reply = await use(proxy, 3, [*GRANDCHILD, 1])
        assert (reply["computed"], await residencies(proxy)) == (1, {1: "evicted", 2: "saved", 3: "resident"})


async def test_room_is_made_by_way_of_the_disk(tmp_path: Path) -> None:
    """With all ids taken the idle pool that leaves is saved first; so is one that leaves for its cells."""
    async with vault(tmp_path, FakeEngine(max_pools=2, n_ctx=220)) as proxy:
        for first in (100, 200, 300):
            proxy.clock.now += 10
            await proxy.pool(tokens=list(range(first, first + 50)))
        assert await residencies(proxy) == {1: "saved", 2: "resident", 3: "resident"}
        proxy.clock.now += 10
        await proxy.pool(tokens=list(range(400, 550)))
        assert await residencies(proxy) == {1: "saved", 2: "saved", 3: "resident", 4: "resident"}
        assert (await use(proxy, 1, [*range(100, 150), 1]))["computed"] == 1


async def test_what_is_cheaper_to_compute_is_not_saved(tmp_path: Path) -> None:
    """Measured rates decide: after a fast prefill and slow writing nothing is written."""
    async with vault(tmp_path) as proxy:
        proxy.runtime.hub.rates.prefill.note(1e9, 1.0)
        await proxy.pool(tokens=BASE)
        await verb(proxy, 1, "evict")
        assert (await residencies(proxy), files(tmp_path)) == ({1: "evicted"}, {})


# -- two at once --------------------------------------------------------------------------------------------------------------


async def test_requests_that_come_together_read_the_file_once(tmp_path: Path) -> None:
    """They wait for the same work; one of them paid, all are hits."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        await verb(proxy, 1, "evict")
        calls = [proxy.call("/completion", {"prompt": [*BASE, n], "pool_id": 1, "n_predict": 1}) for n in range(4)]
        replies = await asyncio.gather(*calls)
        await proxy.settle()
        assert [reply.headers["x-cached-prefix-tokens"] for reply in replies] == ["40"] * 4
        assert sum("restored" in reply.json()["opencoti"] for reply in replies) == 1
        told = await shown(proxy, 1)
        assert (proxy.engine.n_seqs_restored, told["n_restores"], told["n_hits"], told["n_queries"]) == (1, 1, 4, 4)


async def test_a_pool_that_is_used_while_it_is_saved_is_not_evicted(tmp_path: Path) -> None:
    """The eviction looks again when the file is there: 409, and the pool keeps its KV and its copy."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        proxy.engine.hold()
        evict = asyncio.ensure_future(verb(proxy, 1, "evict"))
        await until_saving(proxy, 1)
        call = asyncio.ensure_future(proxy.call("/completion", {"prompt": [*BASE, 1], "pool_id": 1, "session_id": "a"}))
        async with asyncio.timeout(20):
            while not proxy.runtime.hub.ledger.books:
                await asyncio.sleep(0.005)
        proxy.engine.go()
        assert ((await call).status_code, (await evict)[1]["error"]["code"]) == (200, "pool_busy")
        told = await shown(proxy, 1)
        assert (told["residency"], told["saved_bytes"] > 0) == ("resident", True)


async def test_two_that_make_room_at_once_save_what_each_evicts(tmp_path: Path) -> None:
    """Neither evicts what the other saved without a copy of its own choice."""
    async with vault(tmp_path, FakeEngine(max_pools=3)) as proxy:
        for first in (100, 200, 300):
            proxy.clock.now += 10
            await proxy.pool(tokens=list(range(first, first + 50)))
        proxy.clock.now += 10
        await asyncio.gather(*(proxy.pool(tokens=list(range(first, first + 50))) for first in (400, 500)))
        told = await residencies(proxy)
        assert sorted(told.values()) == ["resident"] * 3 + ["saved"] * 2


async def test_a_pool_released_while_it_is_saved_leaves_no_file(tmp_path: Path) -> None:
    """Its sequence goes under the writer, or its file goes after it."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        proxy.engine.hold()
        saving = asyncio.ensure_future(proxy.runtime.vault.keep(1))
        await until_saving(proxy, 1)
        assert (await proxy.api.delete("/polykv/pools/1")).status_code == 200
        proxy.engine.go()
        assert (await saving, files(tmp_path), await residencies(proxy)) == (False, {}, {})
        assert (await disk(proxy))["paused"] is None


async def test_a_pool_that_goes_before_it_is_saved_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Released while the folder was being looked at: nothing is asked of the engine, nothing fails."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        tidy = proxy.runtime.vault._tidy

        async def released() -> None:
            await proxy.api.delete("/polykv/pools/1")
            await tidy()

        monkeypatch.setattr(proxy.runtime.vault, "_tidy", released)
        assert await proxy.runtime.vault.keep(1) is False
        assert not [path for _, path in proxy.server.calls if path.endswith("/save")]


async def test_a_pool_that_goes_while_the_folder_is_looked_at_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its copy is gone from the disk because it was released: nobody is warned, and the pool that is saved has its copy."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        assert await proxy.runtime.vault.keep(1) is True
        await proxy.pool(tokens=[*BASE[1:], 7])
        folder, loop = proxy.runtime.vault.folder, asyncio.get_running_loop()
        tidy = folder.tidy

        def released(known: Mapping[int, int]) -> list[int]:
            assert asyncio.run_coroutine_threadsafe(proxy.api.delete("/polykv/pools/1"), loop).result(20).status_code == 200
            return tidy(known)

        monkeypatch.setattr(folder, "tidy", released)
        assert await proxy.runtime.vault.keep(2) is True
        assert list(files(tmp_path)) == ["2.kv"]
        assert "gone from the disk" not in caplog.text


async def test_a_long_save_does_not_hold_up_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made beside it; the next sweep begins no second time."""
    monkeypatch.setattr("polykv_proxy.runtime.runtime.SWEEP_S", 0.01)
    async with vault(tmp_path, FakeEngine(n_ctx=200)) as proxy:
        await proxy.pool(tokens=list(range(100, 295)))
        proxy.clock.now += 60
        proxy.engine.hold()
        for _ in range(3):
            await proxy.runtime.sweep()
        await until_saving(proxy, 1)
        proxy.engine.go()
        async with asyncio.timeout(20):
            while (await residencies(proxy))[1] != "saved":
                await asyncio.sleep(0.005)
        assert len([path for _, path in proxy.server.calls if path.endswith("/save")]) == 1


async def test_a_copy_that_is_disowned_while_it_is_written_is_gone(tmp_path: Path) -> None:
    """As for a pool that failed a check: nothing of it is ever read again."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        proxy.engine.hold()
        saving = asyncio.ensure_future(proxy.runtime.vault.keep(1))
        await until_saving(proxy, 1)
        await proxy.runtime.vault.forget(1)
        proxy.engine.go()
        assert (await saving, files(tmp_path), (await shown(proxy, 1))["saved_bytes"]) == (False, {}, 0)


async def test_a_release_deletes_the_file(tmp_path: Path) -> None:
    """Of a saved pool, and of a resident one that was restored."""
    async with vault(tmp_path) as proxy:
        await chain(proxy)
        await verb(proxy, 1, "flush")
        await use(proxy, 1, [*BASE, 1])
        assert (await proxy.api.delete("/polykv/pools/3")).status_code == 200
        assert sorted(files(tmp_path)) == ["1.kv", "2.kv"]
        assert (await proxy.api.delete("/polykv/pools/1?recursive=1")).status_code == 200
        assert files(tmp_path) == {}


async def test_a_restore_without_room_evicts_as_a_prefill_would(tmp_path: Path) -> None:
    """An idle pool makes room; when all is kept the request goes without, and the copy stays."""
    async with vault(tmp_path, FakeEngine(max_pools=1)) as proxy:
        await proxy.pool(tokens=BASE)
        proxy.clock.now += 10
        await proxy.pool(tokens=[60, 61])
        assert await residencies(proxy) == {1: "saved", 2: "resident"}
        proxy.clock.now += 10
        assert (await use(proxy, 1, [*BASE, 1])).get("restored") is True
        assert await residencies(proxy) == {1: "resident", 2: "saved"}
        await verb(proxy, 1, "pin")
        reply = await use(proxy, 2, [60, 61, 1])
        assert (reply["miss"], reply["cached_prefix_tokens"], sorted(files(tmp_path))) == ("no_seq_ids", 0, ["1.kv", "2.kv"])


# -- the limit ----------------------------------------------------------------------------------------------------------------


async def test_the_coldest_copies_leave_and_the_limit_is_never_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by a file that is being written: what lies in the folder is looked at all the while."""
    largest, limit = 0, 35_000
    async with vault(tmp_path, FakeEngine(max_pools=8), limit=limit) as proxy:
        wait = proxy.engine.gate

        async def gate() -> None:
            nonlocal largest
            largest = max(largest, sum(files(tmp_path).values()))
            await wait()

        monkeypatch.setattr(proxy.engine, "gate", gate)
        for n in range(6):
            proxy.clock.now += 10
            await proxy.pool(tokens=list(range(100 + 50 * n, 150 + 50 * n)))
        for pool in range(1, 7):
            await verb(proxy, pool, "evict")
            largest = max(largest, sum(files(tmp_path).values()))
        kept = [pool for pool, told in (await residencies(proxy)).items() if told == "saved"]
        assert kept == list(range(7 - len(kept), 7)), "the latest used are kept"
        assert len(kept) == 3
        assert 0 < largest <= limit
