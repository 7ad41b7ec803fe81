"""KV on disk over the fake engine: files and disks that are not as they should be, and do no harm."""

import shutil
from pathlib import Path

import pytest

from polykv_proxy.errors import JournalError
from polykv_proxy.runtime.copy_folder import CopyFolder
from tests.fakes import fake_files
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.vault_rig import (
    BASE,
    CHILD,
    chain,
    disk,
    files,
    residencies,
    use,
    vault,
    verb,
)

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
