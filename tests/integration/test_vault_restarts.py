"""KV on disk over the fake engine: crashes at every point, restarts, and what is done in quiet moments."""

import asyncio
import shutil
from pathlib import Path

import pytest

from polykv_proxy.runtime.vault import Vault
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import ManualClock, Rig
from tests.integration.vault_rig import (
    BASE,
    CHILD,
    GRANDCHILD,
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


def killed(proxy: Rig) -> None:
    """From here on nothing more is copied or written down, and the engine starts anew."""

    async def nothing(*_: object) -> None:
        pass

    proxy.runtime.keeper.copy_all = nothing  # type: ignore[method-assign]
    proxy.runtime.hub.journal.save_uses = nothing  # type: ignore[method-assign]
    proxy.engine.boot()


async def keep(proxy: Rig) -> int:
    """Let the keeper do what it finds once it has been quiet for a while; how many things it did."""
    n = int(await proxy.runtime.keeper.step())
    proxy.clock.now += 3
    while await proxy.runtime.keeper.step():
        n += 1
    return n


async def crash(proxy: Rig) -> None:
    """The engine dies and comes back."""
    await proxy.server.crash()
    await proxy.server.restart()
    await proxy.until_linked(proxy.engine.boot_id)


# -- the start ----------------------------------------------------------------------------------------------------------------


def stray(kv: Path) -> None:
    shutil.copy(kv / "1.kv", kv / "77.kv")


def half_written(kv: Path) -> None:
    (kv / "1.kv").rename(kv / "1.kv.part")


def cut(kv: Path) -> None:
    (kv / "1.kv").write_bytes((kv / "1.kv").read_bytes()[:-1])


def gone(kv: Path) -> None:
    (kv / "1.kv").unlink()


def all_gone(kv: Path) -> None:
    shutil.rmtree(kv)


@pytest.mark.parametrize(("accident", "left"), [(stray, ["1.kv"]), (half_written, []), (cut, []), (gone, []), (all_gone, [])])
async def test_files_and_rows_that_do_not_belong_together_are_cleaned_at_the_start(
    tmp_path: Path, accident: object, left: list[str]
) -> None:
    """Whenever the machine died: only the copy is lost. What others put there stays."""
    engine = FakeEngine()
    async with vault(tmp_path, engine) as proxy:
        await proxy.pool(tokens=BASE)
        await verb(proxy, 1, "evict")
        killed(proxy)
    kv = tmp_path / "state" / "kv"
    accident(kv)  # type: ignore[operator]
    kv.mkdir(exist_ok=True)
    (kv / "notes.txt").touch()
    (kv / "5.kv").mkdir()
    async with vault(tmp_path, engine) as proxy:
        assert sorted(files(tmp_path)) == sorted([*left, "notes.txt", "5.kv"])
        assert (await residencies(proxy))[1] == ("saved" if left else "evicted")
        reply = await use(proxy, 1, [*BASE, 1])
        assert (reply["cached_prefix_tokens"], reply.get("restored"), reply.get("rebuilt")) == (
            40,
            True if left else None,
            None if left else True,
        )


async def test_a_file_that_was_written_and_not_written_down_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy dies between the file and its row."""
    engine = FakeEngine()
    async with vault(tmp_path, engine) as proxy:
        await proxy.pool(tokens=BASE)

        async def dies(*_: object) -> None:
            raise asyncio.CancelledError

        with monkeypatch.context() as broken:
            broken.setattr(Vault, "_run", dies)
            with pytest.raises(asyncio.CancelledError):
                await proxy.runtime.vault.keep(1)
        assert list(files(tmp_path)) == ["1.kv"]
        killed(proxy)
    async with vault(tmp_path, engine) as proxy:
        assert files(tmp_path) == {}
        assert (await use(proxy, 1, [*BASE, 1]))["cached_prefix_tokens"] == 40


async def test_a_lower_limit_and_none_at_all_delete_what_is_too_much(tmp_path: Path) -> None:
    """The coldest go first; without a limit all of them."""
    engine, clock = FakeEngine(), ManualClock()
    async with vault(tmp_path, engine, clock=clock) as proxy:
        for first in (100, 200, 300):
            clock.now += 10
            await proxy.pool(tokens=list(range(first, first + 40)))
        for pool in (1, 2, 3):
            await verb(proxy, pool, "evict")
    one = files(tmp_path)["1.kv"]
    async with vault(tmp_path, engine, limit=2 * one + 10, clock=clock) as proxy:
        assert list(files(tmp_path)) == ["2.kv", "3.kv"]
        assert await residencies(proxy) == {1: "evicted", 2: "saved", 3: "saved"}
    async with vault(tmp_path, engine, limit=0, clock=clock) as proxy:
        assert (files(tmp_path), (await disk(proxy))["on"]) == ({}, False)
        assert "saved" not in (await residencies(proxy)).values()
        assert (await use(proxy, 3, [*range(300, 340), 1])).get("rebuilt") is True


async def test_the_same_boot_is_adopted_with_its_copies(tmp_path: Path) -> None:
    """A proxy that comes back to a living engine finds KV in the cache and copies on disk."""
    engine = FakeEngine()
    async with vault(tmp_path, engine) as proxy:
        await chain(proxy)
        await verb(proxy, 3, "evict")
        before = [await shown(proxy, pool) for pool in (1, 2, 3)]
        proxy.runtime.keeper.end()
    assert (before[0]["saved_bytes"], before[2]["saved_bytes"] > 0) == (0, True)
    async with vault(tmp_path, engine) as proxy:
        assert await residencies(proxy) == {1: "resident", 2: "resident", 3: "saved"}
        assert [(await shown(proxy, pool))["saved_bytes"] > 0 for pool in (1, 2, 3)] == [True, True, True], "copied at the stop"
        assert (await use(proxy, 3, [*GRANDCHILD, 1]))["computed"] == 1


# -- after a boot -------------------------------------------------------------------------------------------------------------


async def test_a_stop_copies_and_a_start_reads_back(tmp_path: Path) -> None:
    """What was resident is resident again, parents first, and nothing is computed; what was evicted is not."""
    engine, clock = FakeEngine(max_pools=6), ManualClock()
    async with vault(tmp_path, engine, clock=clock) as proxy:
        await chain(proxy)
        clock.now += 10
        await proxy.pool(tokens=[60, 61])
        await verb(proxy, 4, "evict")
    assert sorted(files(tmp_path)) == ["1.kv", "2.kv", "3.kv", "4.kv"]
    engine.boot()
    engine.computed = 0
    async with vault(tmp_path, engine, clock=clock) as proxy:
        assert await residencies(proxy) == dict.fromkeys(range(1, 5), "saved")
        assert await keep(proxy) == 3
        assert await residencies(proxy) == {1: "resident", 2: "resident", 3: "resident", 4: "saved"}
        assert [(await shown(proxy, pool))["n_shared"] for pool in (1, 2, 3)] == [0, 40, 42]
        assert (engine.computed, engine.n_seqs_restored, engine.used_cells()) == (0, 3, 44)


async def test_a_killed_engine_comes_back_with_what_was_copied(tmp_path: Path) -> None:
    """Copies made in quiet moments serve; what had none waits for its use."""
    async with vault(tmp_path) as proxy:
        await chain(proxy)
        assert await keep(proxy) == 3
        await proxy.pool(tokens=[60, 61])
        await crash(proxy)
        assert await residencies(proxy) == {1: "saved", 2: "saved", 3: "saved", 4: "lost"}
        assert await keep(proxy) == 3
        assert await residencies(proxy) == {1: "resident", 2: "resident", 3: "resident", 4: "lost"}
        await crash(proxy)
        assert await keep(proxy) == 3, "and again, with the same copies"


async def test_requests_join_what_is_read_back(tmp_path: Path) -> None:
    """A request in the middle of it waits for the same work, and pays for nothing."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        await keep(proxy)
        await crash(proxy)
        proxy.engine.hold()
        step = asyncio.ensure_future(proxy.runtime.keeper.step())
        async with asyncio.timeout(20):
            while proxy.runtime.pools.flight(1) is None:
                await asyncio.sleep(0.005)
        calls = [asyncio.ensure_future(proxy.call("/completion", {"prompt": [*BASE, n], "pool_id": 1})) for n in range(3)]
        async with asyncio.timeout(20):
            while (flight := proxy.runtime.pools.flight(1)) is None or flight.unasked:
                await asyncio.sleep(0.005)
        proxy.engine.go()
        replies = await asyncio.gather(*calls)
        assert await step is True
        assert [reply.headers["x-cached-prefix-tokens"] for reply in replies] == ["40"] * 3
        assert proxy.engine.n_seqs_restored == 1
        assert not any("restored" in reply.json()["opencoti"] for reply in replies)


async def test_who_joins_gets_a_prefill_when_the_copy_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unasked, a bad copy ends it; somebody who waits has the pool computed."""
    async with vault(tmp_path) as proxy:
        for first in (100, 200):
            await proxy.pool(tokens=list(range(first, first + 40)))
        await keep(proxy)
        await crash(proxy)
        for pool in (1, 2):
            path = tmp_path / "state" / "kv" / f"{pool}.kv"
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        computed = proxy.engine.computed
        assert await proxy.runtime.keeper.step() is True
        assert (proxy.engine.computed, (await residencies(proxy))[1]) == (computed, "lost")
        assert proxy.runtime.hub.tally.rebuilds == {}, "nobody asked, nobody failed"
        seen, joined, refuse = asyncio.Event(), asyncio.Event(), proxy.runtime.vault.refuse

        async def when_joined(pool_id: int, why: str) -> None:
            seen.set()
            await joined.wait()
            await refuse(pool_id, why)

        monkeypatch.setattr(proxy.runtime.vault, "refuse", when_joined)
        step = asyncio.ensure_future(proxy.runtime.keeper.step())
        await asyncio.wait_for(seen.wait(), 20)
        call = asyncio.ensure_future(proxy.call("/completion", {"prompt": [*range(200, 240), 1], "pool_id": 2}))
        async with asyncio.timeout(20):
            while (flight := proxy.runtime.pools.flight(2)) is None or flight.unasked:
                await asyncio.sleep(0.005)
        joined.set()
        assert (await call).headers["x-cached-prefix-tokens"] == "40"
        await step
        assert (await residencies(proxy))[2] == "resident"


async def test_what_is_read_back_takes_only_free_room(tmp_path: Path) -> None:
    """Ids and a quarter of the cells stay for those who come: nobody is evicted, and the rest waits for its use."""
    engine = FakeEngine(max_pools=3, n_ctx=400)
    async with vault(tmp_path, engine) as proxy:
        for first in (100, 300, 500):
            proxy.clock.now += 10
            await proxy.pool(tokens=list(range(first, first + 110)))
        assert await keep(proxy) == 3
        await crash(proxy)
        assert await keep(proxy) == 2
        assert await residencies(proxy) == {1: "saved", 2: "resident", 3: "resident"}
        assert await keep(proxy) == 0
        await crash(proxy)
        for first in (700, 720):
            await proxy.pool(tokens=list(range(first, first + 5)))
        before = proxy.engine.n_seqs_restored
        await keep(proxy)
        assert proxy.engine.n_seqs_restored - before == 1
        assert await residencies(proxy) == {1: "saved", 2: "saved", 3: "resident", 4: "resident", 5: "resident"}


async def test_a_place_that_is_taken_meanwhile_is_not_taken_back(tmp_path: Path) -> None:
    """Ids that ran out between the look and the call: what is read back unasked gives up instead of evicting."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        await keep(proxy)
        await crash(proxy)
        await proxy.pool(tokens=[60, 61])
        proxy.engine.fail_next("restore", EngineFaultError(429, "no_seq_ids", "all sequence ids are in use"))
        await proxy.runtime.keeper.step()
        assert await residencies(proxy) == {1: "saved", 2: "resident"}
        assert (await use(proxy, 1, [*BASE, 1])).get("restored") is True


async def test_a_sleeping_engine_is_left_asleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading back would wake it; it is done when it is awake."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        await keep(proxy)
        await crash(proxy)
        state = proxy.engine.state
        with monkeypatch.context() as asleep:
            asleep.setattr(proxy.engine, "state", lambda: {**state(), "phase": "sleeping"})
            assert await proxy.runtime.keeper.step() is False
        assert await proxy.runtime.keeper.step() is True


async def test_an_engine_of_another_model_finds_no_copies_to_read(tmp_path: Path) -> None:
    """Its pools are failed; with their model back they are saved again, and read."""
    engine = FakeEngine()
    async with vault(tmp_path, engine) as proxy:
        await proxy.pool(tokens=BASE)
    engine.fingerprint, mine = "00000000000000bb", engine.fingerprint
    engine.boot()
    async with vault(tmp_path, engine) as proxy:
        assert (await keep(proxy), await residencies(proxy), list(files(tmp_path))) == (0, {1: "failed"}, ["1.kv"])
    engine.fingerprint = mine
    engine.boot()
    async with vault(tmp_path, engine) as proxy:
        assert (await residencies(proxy))[1] == "saved"
        assert (await use(proxy, 1, [*BASE, 1])).get("restored") is True


# -- when nothing runs --------------------------------------------------------------------------------------------------------


async def test_quiet_moments_make_one_copy_at_a_time_hottest_first(tmp_path: Path) -> None:
    """Not right after something ran, and never twice."""
    async with vault(tmp_path) as proxy:
        await chain(proxy)
        await proxy.pool(tokens=[60, 61, 62])
        proxy.clock.now += 10
        assert await use(proxy, 2, [*CHILD, 1])
        assert await proxy.runtime.keeper.step() is False
        proxy.clock.now += 3
        for n in (1, 2, 3, 4):
            assert await proxy.runtime.keeper.step() is True
            assert list(files(tmp_path)) == [f"{pool}.kv" for pool in range(1, n + 1)]
        assert await keep(proxy) == 0
        assert (await disk(proxy))["n_saves"] == 4


async def test_nothing_is_copied_while_something_runs(tmp_path: Path) -> None:
    """A running request starts the quiet time anew."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        assert await proxy.runtime.keeper.step() is False
        proxy.clock.now += 3
        proxy.engine.hold()
        call = asyncio.ensure_future(proxy.call("/completion", {"prompt": [*BASE, 1], "pool_id": 1}))
        async with asyncio.timeout(20):
            while all(slot.state == "idle" for slot in proxy.engine.slots):
                await asyncio.sleep(0.005)
        assert await proxy.runtime.keeper.step() is False
        proxy.engine.go()
        await call
        await proxy.settle()
        assert await proxy.runtime.keeper.step() is False
        proxy.clock.now += 3
        assert await proxy.runtime.keeper.step() is True


async def test_a_stop_waits_no_longer_than_its_grace(tmp_path: Path) -> None:
    """An engine that does not write in time leaves no copy and no trouble."""
    engine = FakeEngine()
    async with vault(tmp_path, engine) as proxy:
        await proxy.pool(tokens=BASE)
        engine.hold()
        await proxy.runtime.keeper.copy_all(0.05)
        engine.go()
        proxy.runtime.keeper.copy_all = lambda _: asyncio.sleep(0)  # type: ignore[method-assign, assignment]
    engine.boot()
    async with vault(tmp_path, engine) as proxy:
        assert (await residencies(proxy), files(tmp_path)) == ({1: "lost"}, {})


async def test_a_second_signal_ends_the_copying(tmp_path: Path) -> None:
    """Who is in a hurry waits for no copy, neither for one in the middle nor for the next."""
    async with vault(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        proxy.engine.hold()
        copying = asyncio.ensure_future(proxy.runtime.keeper.copy_all(1000.0))
        await until_saving(proxy, 1)
        proxy.runtime.keeper.hurry()
        await copying
        await proxy.runtime.keeper.copy_all(1000.0)
        proxy.engine.go()
        assert files(tmp_path) == {}
