"""Engines that die, sleep or change, proxies that restart, journals that break: nothing lost, nothing leaked, nothing pretended."""

import asyncio
import os
import random
import sqlite3
from pathlib import Path

import pytest

from polykv_proxy.errors import JournalError, SettingsError
from polykv_proxy.runtime.journal import Journal
from polykv_proxy.runtime.state_folder import StateFolder
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import ManualClock, rig, served

SYSTEM = "You are a careful agent with many tools and a long memory"
ASK = {"prompt": SYSTEM + " and a question", "n_predict": 2}


async def test_a_crash_loses_pools_and_the_next_attach_rebuilds_them(tmp_path: Path) -> None:
    """While the engine is away pools are lost and books stay; with the new boot books close, and an attach brings the pool back."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt=SYSTEM, name="agents")
        proxy.engine.hold()
        calls = [asyncio.ensure_future(proxy.call("/completion", {**ASK, "pool_id": 1, "session_id": f"s{n}"})) for n in range(3)]
        async with asyncio.timeout(20):
            while sum(slot.state != "idle" for slot in proxy.engine.slots) < 3:
                await asyncio.sleep(0.005)
        await proxy.server.crash()
        await asyncio.gather(*calls, return_exceptions=True)
        await proxy.until_unlinked()
        shown = (await proxy.api.get("/polykv/pools/agents")).json()
        assert (shown["residency"], shown["own_kv_bytes"]) == ("lost", 0)
        away = await proxy.api.post("/polykv/pools", json={"prompt": "x"})
        assert (away.status_code, away.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "retry-after" in away.headers
        await proxy.server.restart()
        await proxy.until_linked(proxy.engine.boot_id)
        assert (len(proxy.runtime.hub.ledger.books), len(proxy.runtime.hub.ledger.sessions)) == (0, 0)
        assert (await proxy.api.get("/polykv/pools/1")).json()["residency"] == "lost"
        reply = await proxy.call("/completion", {**ASK, "pool_id": "agents"})
        assert reply.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])
        assert (await proxy.pool(prompt="next"))["pool_id"] == 2


async def test_a_connection_that_breaks_is_no_crash(tmp_path: Path) -> None:
    """The same boot behind a new connection: pools are resident again without work, and missed endings close their books."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        made = proxy.engine.n_seqs_made
        await proxy.server.crash()
        await proxy.until_unlinked()
        assert (await proxy.api.get("/polykv/pools/1")).json()["residency"] == "lost"
        await proxy.server.start()
        await proxy.until_linked(proxy.engine.boot_id)
        assert (await proxy.api.get("/polykv/pools/1")).json()["residency"] == "resident"
        assert proxy.engine.n_seqs_made == made


async def test_a_create_that_meets_a_crash_leaves_nothing(tmp_path: Path) -> None:
    """The pool being made is gone with the engine; its id is not used again."""
    async with rig(tmp_path) as proxy:
        proxy.engine.hold()
        create = asyncio.ensure_future(proxy.api.post("/polykv/pools", json={"prompt": SYSTEM, "name": "p"}))
        async with asyncio.timeout(20):
            while (flight := proxy.runtime.pools.flight(1)) is None or flight.latest is None or flight.latest.progress is None:
                await asyncio.sleep(0.005)
        await proxy.server.crash()
        reply = await create
        assert reply.status_code == 503
        await proxy.server.restart()
        await proxy.until_linked(proxy.engine.boot_id)
        assert (await proxy.api.get("/polykv/pools")).json()["pools"] == []
        assert (await proxy.pool(prompt=SYSTEM, name="p"))["pool_id"] == 2


async def test_a_restarted_proxy_adopts_what_the_engine_still_holds(tmp_path: Path) -> None:
    """Same engine boot: pools, names and ids are back without computing; strays and orphaned sessions are given back."""
    state = tmp_path / "state"
    async with served(FakeEngine(), tmp_path) as server:
        async with rig(tmp_path, server=server, state_dir=state) as proxy:
            first = await proxy.pool(prompt=SYSTEM, name="agents")
            await proxy.pool(prompt="second one")
            await proxy.api.delete("/polykv/pools/2")
            await proxy.call("/completion", {"prompt": "hi", "session_id": "orphan"})
            await proxy.settle()
        async for _ in server.engine.make({"tokens": [20, 21]}):
            pass
        computed = server.engine.computed
        async with rig(tmp_path, server=server, state_dir=state) as proxy:
            shown = (await proxy.api.get("/polykv/pools")).json()["pools"]
            assert [(p["pool_id"], p["name"], p["residency"]) for p in shown] == [(1, "agents", "resident")]
            assert shown[0]["prefix_hash"] == first["prefix_hash"]
            assert (server.engine.computed, len(server.engine.seqs)) == (computed, 1)
            assert {slot.session for slot in server.engine.slots} == {0}
            reply = await proxy.call("/completion", {**ASK, "pool_id": "agents"})
            assert reply.headers["x-cached-prefix-tokens"] == str(first["prefix_len"])
            assert (await proxy.pool(prompt="third"))["pool_id"] == 3


async def test_after_both_restart_pools_are_lost_and_come_back(tmp_path: Path) -> None:
    """Another engine boot under the same journal: lost, and rebuilt from its tokens by the next attach."""
    state = tmp_path / "state"
    engine = FakeEngine()
    async with served(engine, tmp_path) as server, rig(tmp_path, server=server, state_dir=state) as proxy:
        pool = await proxy.pool(prompt=SYSTEM, name="agents")
    engine.boot()
    async with served(engine, tmp_path) as server, rig(tmp_path, server=server, state_dir=state) as proxy:
        assert (await proxy.api.get("/polykv/pools/agents")).json()["residency"] == "lost"
        reply = await proxy.call("/completion", {**ASK, "pool_id": "agents"})
        assert reply.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])


async def test_another_model_fails_pools_and_never_rebuilds_them(tmp_path: Path) -> None:
    """Pools of another model are failed, requests that name them are served in full, and its own model brings them back."""
    state = tmp_path / "state"
    engine = FakeEngine()
    async with rig(tmp_path, engine, state_dir=state) as proxy:
        await proxy.pool(prompt=SYSTEM, name="agents")
    engine.boot()
    engine.fingerprint = "00000000000000bb"
    made = engine.n_seqs_made
    async with rig(tmp_path, engine, state_dir=state) as proxy:
        shown = (await proxy.api.get("/polykv/pools/agents")).json()
        assert (shown["residency"], shown["reason"]) == ("failed", "model_changed")
        reply = await proxy.call("/completion", {**ASK, "pool_id": "agents"})
        assert (reply.headers["x-cached-prefix-tokens"], reply.json()["opencoti"]["miss"]) == ("0", "rebuild_failed")
        taken = await proxy.api.post("/polykv/pools", json={"prompt": SYSTEM, "name": "agents"})
        assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
        assert engine.n_seqs_made == made
    engine.boot()
    engine.fingerprint = "00000000000000aa"
    async with rig(tmp_path, engine, state_dir=state) as proxy:
        assert (await proxy.call("/completion", {**ASK, "pool_id": "agents"})).headers["x-cached-prefix-tokens"] != "0"


async def test_idempotency_keys_survive_a_restart(tmp_path: Path) -> None:
    """A restarted proxy repeats the answer that the old one gave."""
    state = tmp_path / "state"
    async with served(FakeEngine(), tmp_path) as server:
        answers = []
        for _ in range(2):
            async with rig(tmp_path, server=server, state_dir=state) as proxy:
                answers.append(await proxy.api.post("/polykv/pools", json={"prompt": SYSTEM}, headers={"idempotency-key": "k"}))
        assert (answers[0].status_code, answers[0].text) == (201, answers[1].text)
        assert server.engine.n_seqs_made == 1


async def test_an_id_that_was_promised_is_never_used_again(tmp_path: Path) -> None:
    """Even an id whose pool never came to be is not handed out by a later proxy."""
    state = tmp_path / "state"
    async with served(FakeEngine(), tmp_path) as server:
        async with rig(tmp_path, server=server, state_dir=state) as proxy:
            proxy.engine.hold()
            assert (await proxy.api.post("/polykv/pools?wait=0", json={"prompt": SYSTEM})).json()["pool_id"] == 1
        server.engine.go()
        async with rig(tmp_path, server=server, state_dir=state) as proxy:
            assert (await proxy.pool(prompt=SYSTEM))["pool_id"] == 2


async def test_a_journal_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full disk a create leaves no pool and no sequence, and a delete leaves the pool attached and usable; both say 507."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt=SYSTEM, name="agents")

        async def full(*_args: object) -> None:
            raise JournalError("the journal cannot be written (disk full); nothing was changed")

        with monkeypatch.context() as broken:
            broken.setattr(proxy.runtime.hub.journal, "save_pool", full)
            broken.setattr(proxy.runtime.hub.journal, "drop_pools", full)
            create = await proxy.api.post("/polykv/pools", json={"prompt": "another"})
            delete = await proxy.api.delete("/polykv/pools/agents")
            assert [(r.status_code, r.json()["error"]["code"]) for r in (create, delete)] == [(507, "journal_failed")] * 2
        assert len(proxy.engine.seqs) == 1
        assert [p["residency"] for p in (await proxy.api.get("/polykv/pools")).json()["pools"]] == ["resident"]
        reply = await proxy.call("/completion", {**ASK, "pool_id": 1})
        assert reply.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])


async def test_a_release_that_fails_in_mid_rebuild_leaves_a_pool_that_can_be_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stopped work is not forgotten work: the pool is lost, not for ever materializing, and the next attach brings it."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt=SYSTEM)
        await proxy.engine.sleep_and_wake()
        await proxy.until_linked(proxy.engine.boot_id)
        proxy.engine.hold()
        call = asyncio.ensure_future(proxy.call("/completion", {**ASK, "pool_id": 1}))
        while proxy.runtime.pools.flight(1) is None:
            await asyncio.sleep(0)

        async def full(*_args: object) -> None:
            raise JournalError("disk full")

        with monkeypatch.context() as broken:
            broken.setattr(proxy.runtime.hub.journal, "drop_pools", full)
            assert (await proxy.api.delete("/polykv/pools/1")).status_code == 507
        proxy.engine.go()
        assert (await call).status_code == 200
        await proxy.settle()
        for slot in proxy.engine.slots:
            slot.clear()
        reply = await proxy.call("/completion", {**ASK, "pool_id": 1})
        assert reply.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])


async def test_a_damaged_journal_is_moved_aside(tmp_path: Path) -> None:
    """A file that is no journal is kept under another name, and service starts with an empty one."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "journal.sqlite").write_bytes(b"not a database, certainly" * 100)
    async with rig(tmp_path, state_dir=state) as proxy:
        assert proxy.runtime.hub.journal.moved_aside is not None
        assert proxy.runtime.hub.journal.moved_aside.exists()
        await proxy.pool(prompt=SYSTEM)
    assert oct(state.stat().st_mode)[-3:] == "700"
    assert {oct(path.stat().st_mode)[-3:] for path in state.glob("journal.sqlite") if path.is_file()} == {"600"}


async def test_tokens_that_do_not_match_their_hash_are_damage(tmp_path: Path) -> None:
    """A flipped byte in a pool's tokens is found at start; foreign tokens are never rebuilt into a pool."""
    state = tmp_path / "state"
    async with rig(tmp_path, state_dir=state) as proxy:
        await proxy.pool(tokens=[20, 21, 22])
    with sqlite3.connect(state / "journal.sqlite") as db:
        db.execute("UPDATE pools SET own_tokens = x'010000000200000003000000'")
    db.close()
    async with rig(tmp_path, state_dir=state) as proxy:
        assert proxy.runtime.hub.journal.moved_aside is not None
        assert (await proxy.api.get("/polykv/pools")).json()["pools"] == []


async def test_a_journal_from_the_future_is_not_touched(tmp_path: Path) -> None:
    """A newer schema is refused with the remedy, and the file stays as it is."""
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    journal = Journal(path)
    with pytest.raises(SettingsError, match="newer polykv-proxy"):
        await journal.open(0)
    await journal.close()
    assert sorted(p.name for p in tmp_path.iterdir() if "corrupt" in p.name) == []


def test_a_state_folder_serves_one_proxy(tmp_path: Path) -> None:
    """A second proxy is refused with the holder's pid and the way out; when the first is gone the folder is free."""
    first = StateFolder(tmp_path / "state")
    with pytest.raises(SettingsError, match=f"pid {os.getpid()}.*--state-dir"):
        StateFolder(tmp_path / "state")
    first.close()
    StateFolder(tmp_path / "state").close()


async def test_two_hundred_random_steps_lose_and_leak_nothing(tmp_path: Path) -> None:
    """Whatever dies in whatever order, announced pools are there, their prefix is shared again, and no sequence is a stray."""
    rng = random.Random(7)
    engine, clock, state = FakeEngine(max_pools=6), ManualClock(), tmp_path / "state"
    known: dict[int, int] = {}
    async with served(engine, tmp_path) as server:
        for round_no in range(13):
            async with rig(tmp_path, server=server, clock=clock, state_dir=state) as proxy:
                for step in range(16):
                    what = rng.choice(["create", "attach", "attach", "delete", "crash", "sleep"])
                    if what == "create" and len(known) < 6:
                        pool = await proxy.pool(prompt=f"{SYSTEM} {round_no} {step}")
                        assert pool["pool_id"] not in known
                        known[pool["pool_id"]] = pool["prefix_len"]
                    elif what == "attach" and known:
                        pool_id = rng.choice(sorted(known))
                        body = {
                            "prompt": [*_tokens(proxy, pool_id), 1000 + step],
                            "n_predict": 1,
                            "pool_id": pool_id,
                            "cache_prompt": True,
                        }
                        reply = await proxy.call("/completion", body)
                        assert reply.status_code == 200
                        assert (await proxy.api.get(f"/polykv/pools/{pool_id}")).json()["residency"] == "resident"
                    elif what == "delete" and known:
                        pool_id = rng.choice(sorted(known))
                        await proxy.settle()
                        assert (await proxy.api.delete(f"/polykv/pools/{pool_id}")).status_code in {200, 202}
                        del known[pool_id]
                    elif what == "crash":
                        await server.crash()
                        await server.restart()
                        await proxy.until_linked(engine.boot_id)
                    elif what == "sleep":
                        await engine.sleep_and_wake()
                        await proxy.until_linked(engine.boot_id)
                await proxy.settle()
                shown = {p["pool_id"]: p for p in (await proxy.api.get("/polykv/pools")).json()["pools"]}
                assert {key: p["prefix_len"] for key, p in shown.items()} == known
                assert len(engine.seqs) == sum(p["residency"] == "resident" for p in shown.values())


def _tokens(proxy: object, pool_id: int) -> list[int]:
    return proxy.runtime.hub.ledger.tree.get(pool_id).tokens.tolist()  # type: ignore[attr-defined]
