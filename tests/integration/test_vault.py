"""KV on disk over the fake engine: what is saved when, what comes back how, and what goes wrong without harm."""

import asyncio
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from polykv_proxy.core.tally import Rebuilt
from polykv_proxy.errors import JournalError
from polykv_proxy.runtime.copy_folder import CopyFolder
from tests.fakes import fake_files
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
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


# -- files that are not right -------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)


def another_s(path: Path) -> None:
    shutil.copy(path.with_name("2.kv"), path)


@pytest.mark.parametrize("damage", [cut, changed, another_s, Path.unlink])
async def test_a_copy_that_is_not_right_is_deleted_and_the_pool_computed(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut, changed, another pool's, or gone: said once and counted; the request is served with its pool."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        await proxy.pool(tokens=[*range(200, 240)])
        for pool in (1, 2):
            await verb(proxy, pool, "evict")
        damage(tmp_path / "state" / "kv" / "1.kv")  # type: ignore[operator]
        reply = await use(proxy, 1, [*BASE, 1])
        assert (reply["cached_prefix_tokens"], reply["computed"], reply.get("rebuilt")) == (40, 41, True)
        assert ((await disk(proxy))["n_refused"], list(files(tmp_path))) == (1, ["2.kv"])
        assert sum("the copy of pool 1 is deleted" in line for line in caplog.messages) == 1
        assert [seq.tokens for seq in proxy.engine.seqs.values()] == [BASE]
        await verb(proxy, 1, "evict")
        assert (await use(proxy, 1, [*BASE, 1])).get("restored") is True


async def test_copies_of_another_model_or_build_are_refused_and_made_anew(tmp_path: Path) -> None:
    """The engine knows; the proxy computes the pool again."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        await verb(proxy, 1, "evict")
        data = (tmp_path / "state" / "kv" / "1.kv").read_bytes()
        seq = fake_files.Seq("9.9", BASE, [])
        proxy.engine.fingerprint, known = "00000000000000ff", proxy.engine.fingerprint
        foreign = fake_files._packed(proxy.engine, seq, 0)
        proxy.engine.fingerprint = known
        assert len(foreign) == len(data)
        (tmp_path / "state" / "kv" / "1.kv").write_bytes(foreign)
        assert (await use(proxy, 1, [*BASE, 1])).get("rebuilt") is True
        assert files(tmp_path) == {}


async def test_a_refusal_for_the_parent_s_sake_deletes_no_file(tmp_path: Path) -> None:
    """When the parent's sequence went behind our back, the parent is brought back and the child's copy stays."""
    async with vault(tmp_path) as proxy:
        await chain(proxy)
        await verb(proxy, 3, "evict")
        await verb(proxy, 2, "evict")
        proxy.engine.free(str(proxy.runtime.pools.find(1).seq))
        assert (await use(proxy, 2, [*CHILD, 1]))["cached_prefix_tokens"] == 42
        assert "2.kv" in files(tmp_path)
        assert (await disk(proxy))["n_refused"] == 0


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


# -- disks that are not right -------------------------------------------------------------------------------------------------


async def test_a_full_disk_pauses_copies_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning; pools are evicted without a copy; after the pause a copy is tried again, and it is said that it works."""
    full = EngineFaultError(507, "save_failed", "writing failed: No space left on device")
    async with vault(tmp_path) as proxy:
        for first in (100, 200, 300):
            await proxy.pool(tokens=list(range(first, first + 50)))
        proxy.engine.fail_next("write", full)
        for pool in (1, 2):
            await verb(proxy, pool, "evict")
        assert await residencies(proxy) == {1: "evicted", 2: "evicted", 3: "resident"}
        assert "No space left" in (await disk(proxy))["paused"]
        proxy.engine.fail_next("write", full)
        proxy.clock.now += 61
        assert await proxy.runtime.vault.keep(3) is False
        proxy.clock.now += 121
        await verb(proxy, 3, "evict")
        assert ((await residencies(proxy))[3], (await disk(proxy))["paused"]) == ("saved", None)
        said = [line for line in caplog.messages if "copied to disk" in line]
        assert (len(said), "No space left" in said[0], "again" in said[1]) == (2, True, True)


async def test_a_disk_without_room_to_spare_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bytes are the journal's: the engine is not even asked."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        monkeypatch.setattr(CopyFolder, "free_bytes", lambda _: 1_000_000)
        await verb(proxy, 1, "evict")
        assert (await residencies(proxy), "1000000 bytes left" in (await disk(proxy))["paused"]) == ({1: "evicted"}, True)
        assert not [path for _, path in proxy.server.calls if path.endswith("/save")]


async def test_a_folder_that_is_deleted_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its copies are gone, which is found out at the next one; pools are computed."""
    async with vault(tmp_path) as proxy:
        for first in (100, 200):
            await proxy.pool(tokens=list(range(first, first + 40)))
        await verb(proxy, 1, "evict")
        shutil.rmtree(tmp_path / "state" / "kv")
        await verb(proxy, 2, "evict")
        await proxy.runtime.hub.settle()
        assert (await residencies(proxy), list(files(tmp_path))) == ({1: "evicted", 2: "saved"}, ["2.kv"])
        assert sum("copies of pools [1] are gone" in line for line in caplog.messages) == 1
        assert (await use(proxy, 1, [*BASE, 1])).get("rebuilt") is True


async def test_what_is_no_folder_pauses_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file in its place, as anything else that cannot be written to."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        (tmp_path / "state" / "kv").rmdir()
        (tmp_path / "state" / "kv").touch()
        await verb(proxy, 1, "evict")
        assert (await residencies(proxy), sum("copied to disk" in line for line in caplog.messages)) == ({1: "evicted"}, 1)
        assert (await use(proxy, 1, [*BASE, 1])).get("rebuilt") is True


async def test_an_engine_with_other_disks_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes where we cannot see it: one warning, no copy in the books."""

    async def elsewhere(*_: object) -> dict:
        return {"n_tokens": 40, "from": 0, "kv_bytes": 1}

    monkeypatch.setattr(fake_files, "save", elsewhere)
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        await verb(proxy, 1, "evict")
        assert (await residencies(proxy), "other disks" in (await disk(proxy))["paused"]) == ({1: "evicted"}, True)


async def test_a_pool_made_under_adapters_is_not_tried_again(tmp_path: Path) -> None:
    """The engine cannot save it: no pause for the others."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        proxy.engine.fail_next("save", EngineFaultError(501, "lora", "made under adapters"))
        await verb(proxy, 1, "evict")
        await use(proxy, 1, [*BASE, 1])
        await verb(proxy, 1, "evict")
        assert ((await residencies(proxy))[1], (await disk(proxy))["paused"]) == ("evicted", None)
        assert len([path for _, path in proxy.server.calls if path.endswith("/save")]) == 1


async def test_a_journal_that_cannot_be_written_costs_only_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is used as long as this proxy lives; the next start does not know it and deletes it."""
    engine = FakeEngine()
    async with vault(tmp_path, engine) as proxy:
        await proxy.pool(tokens=BASE)
        with monkeypatch.context() as broken:
            broken.setattr(proxy.runtime.hub.journal, "update_pool", _full)
            await verb(proxy, 1, "evict")
        assert (await residencies(proxy))[1] == "saved"
        proxy.engine.boot()
    async with vault(tmp_path, engine) as proxy:
        assert (files(tmp_path), (await residencies(proxy))[1] in {"lost", "evicted"}) == ({}, True)


async def _full(*_: object) -> None:
    raise JournalError("full")


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


async def test_a_folder_in_the_place_of_a_copy_stops_no_other_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is somebody's and stays; its pool goes without a copy, which is said once; all others have theirs."""
    async with vault(tmp_path) as proxy:
        (tmp_path / "state" / "kv" / "1.kv").mkdir()
        (tmp_path / "state" / "kv" / "2.kv.part").mkdir()
        for n in (1, 2, 3):
            await proxy.pool(tokens=[n, *BASE])
        for n in (1, 2, 3, 1):
            await use(proxy, n, [n, *BASE, 1])
            await verb(proxy, n, "evict")
        assert (await residencies(proxy), (await disk(proxy))["paused"]) == ({1: "evicted", 2: "evicted", 3: "saved"}, None)
        told = [record.getMessage() for record in caplog.records if "is a folder" in record.getMessage()]
        assert [text.split(" is not")[0] for text in told] == ["pool 1", "pool 2"]
        assert (await proxy.api.delete("/polykv/pools/1")).status_code == 200
    assert set(files(tmp_path)) == {"1.kv", "2.kv.part", "3.kv"}
