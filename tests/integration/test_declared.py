"""Declared pools: made, kept, replaced; one that fails stops no other; made again for each boot of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from polykv_proxy.api.context import Keys
from polykv_proxy.core.admission.policy import Policy
from polykv_proxy.core.prefix import as_tokens
from polykv_proxy.errors import JournalError
from polykv_proxy.runtime.orders import Declared, Lease, PoolSpec
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import ManualClock, Rig, rig, served

SYS = list(range(100, 130))
TASK = [*SYS, *range(200, 220)]


def tokens(
    name: str, ids: Sequence[int], parent: str | None = None, pin: Lease | Literal[False] | None = None, ttl_s: float | None = None
) -> Declared:
    return Declared(name, PoolSpec(tokens=as_tokens(ids), name=name, ttl_s=ttl_s), parent, pin)


TREE = [tokens("sys", SYS, pin=Lease("file", None)), tokens("task", TASK, "sys")]


async def settled(proxy: Rig) -> dict[str, dict]:
    """The declared pools by name, once they have been made."""
    await asyncio.wait_for(proxy.runtime.declared.settled.wait(), 20)
    await proxy.runtime.hub.settle()
    return await shown(proxy)


async def shown(proxy: Rig) -> dict[str, dict]:
    facts = (await proxy.api.get("/polykv/health")).json()["declared"]
    return {one["name"]: one for one in facts["pools"]}


async def outcomes(proxy: Rig) -> dict[str, tuple[str, int | None]]:
    return {name: (one["outcome"], one["pool_id"]) for name, one in (await settled(proxy)).items()}


async def made_again(proxy: Rig, name: str) -> dict:
    """Until a pool is resident, without a request for it."""
    async with asyncio.timeout(20):
        while (pool := (await proxy.api.get(f"/polykv/pools/{name}")).json())["residency"] != "resident":
            await asyncio.sleep(0.005)
    return pool


async def test_they_are_there_before_anybody_asks(tmp_path: Path) -> None:
    """The tree of the file, with its terms; requests by name share it at once."""
    async with rig(
        tmp_path, declared=[*TREE, Declared("chat", PoolSpec(prompt="You are a pilot.", name="chat", ttl_s=60.0))]
    ) as proxy:
        assert await outcomes(proxy) == {"sys": ("made", 1), "task": ("made", 2), "chat": ("made", 3)}
        system, task, chat = (await proxy.api.get("/polykv/pools")).json()["pools"]
        assert (system["pinned"], system["pin_owner"], system["pin_until_ts"], system["ttl_s"]) == (True, "file", None, None)
        assert (task["parent"], task["branch_pos"], task["n_shared"], task["residency"]) == (1, 30, 30, "resident")
        assert (chat["ttl_s"], chat["source"]) == (60.0, "prompt")
        computed = proxy.engine.computed
        reply = await proxy.call("/completion", {"prompt": [*TASK, 7], "pool_id": "task", "n_predict": 1})
        assert (reply.headers["x-cached-prefix-tokens"], proxy.engine.computed - computed) == ("50", 1)


async def test_without_a_file_nothing_is_said(tmp_path: Path) -> None:
    """No declared pools: settled from the first, null on the health page."""
    async with rig(tmp_path) as proxy:
        assert proxy.runtime.declared.settled.is_set()
        assert (await proxy.api.get("/polykv/health")).json()["declared"] is None


async def test_what_is_there_is_kept_over_a_restart(tmp_path: Path) -> None:
    """Same ids; what the engine still holds costs nothing, what it lost is computed again before anybody asks."""
    clock, state = ManualClock(), tmp_path / "state"
    async with served(FakeEngine(), tmp_path) as server:
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=TREE) as proxy:
            await settled(proxy)
        computed = server.engine.computed
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=TREE) as proxy:
            assert await outcomes(proxy) == {"sys": ("kept", 1), "task": ("kept", 2)}
            assert server.engine.computed == computed
        server.engine.boot()
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=TREE) as proxy:
            assert await outcomes(proxy) == {"sys": ("kept", 1), "task": ("kept", 2)}
            assert [pool["residency"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]] == ["resident"] * 2
            assert server.engine.computed == computed + len(TASK)


async def test_a_changed_text_is_a_new_pool_under_the_old_name(tmp_path: Path) -> None:
    """The new one has the name and the pin, its children follow it, and the old ones go when nobody uses them, leaf first."""
    clock, state = ManualClock(), tmp_path / "state"
    changed = [tokens("sys", [*SYS[:-1], 1]), tokens("task", [*SYS[:-1], 1, *TASK[30:]], "sys", ttl_s=9.0)]
    async with served(FakeEngine(max_pools=8), tmp_path) as server:
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=TREE) as proxy:
            await settled(proxy)
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=changed) as proxy:
            assert await outcomes(proxy) == {"sys": ("replaced", 3), "task": ("replaced", 4)}
            pools = {pool["pool_id"]: pool for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]}
            assert [(pools[n]["name"], pools[n]["pinned"], pools[n]["ttl_s"]) for n in (1, 2, 3, 4)] == [
                (None, False, 0.0),
                (None, False, 0.0),
                ("sys", True, None),
                ("task", False, 9.0),
            ]
            assert (pools[4]["parent"], pools[4]["n_shared"]) == (3, 30)
            for _ in range(3):
                await proxy.runtime.sweep()
                await proxy.settle()
            assert [pool["pool_id"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]] == [3, 4]
            assert proxy.engine.used_cells() == 50
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=changed) as proxy:
            assert await outcomes(proxy) == {"sys": ("kept", 3), "task": ("kept", 4)}


async def test_who_is_attached_to_the_old_pool_stays_there(tmp_path: Path) -> None:
    """A pool made by hand has the name and a session: the name goes to the declared one, the session stays till it asks by name."""
    engine = FakeEngine(max_pools=8)
    async with served(engine, tmp_path) as server, rig(tmp_path, server=server) as proxy:
        await proxy.pool(tokens=SYS, name="sys")
        await proxy.call("/completion", {"prompt": [*SYS, 1], "pool_id": "sys", "session_id": "a", "n_predict": 1})
        await proxy.settle()
        declare(proxy, [tokens("sys", [*SYS, 5])])
        await settled(proxy)
        assert (await proxy.api.get("/polykv/pools/sys")).json()["pool_id"] == 2
        await proxy.runtime.sweep()
        await proxy.settle()
        assert [s["session_id"] for s in (await proxy.api.get("/polykv/pools/1")).json()["sessions"]] == ["a"]
        reply = await proxy.call("/completion", {"prompt": [*SYS, 5, 1], "pool_id": "sys", "session_id": "a", "n_predict": 1})
        assert (reply.headers["x-pool-id"], reply.headers["x-cached-prefix-tokens"]) == ("2", "31")
        await proxy.settle()
        await proxy.runtime.sweep()
        await proxy.settle()
        assert (await proxy.api.get("/polykv/pools/1")).status_code == 404


def declare(proxy: Rig, declared: Sequence[Declared]) -> None:
    """A file that is read while the proxy runs, as if it had just been started."""
    runtime = proxy.runtime
    runtime.declared = type(runtime.declared)(
        runtime.hub, runtime.pools, runtime.lifetimes, runtime.admission, runtime.link, declared=declared
    )
    runtime.hub.spawn(runtime.declared.run())


async def test_one_that_cannot_be_made_stops_no_other(tmp_path: Path) -> None:
    """It says why, and so do its children; the others are there."""
    declared = [
        tokens("long", range(5000)),
        tokens("child", range(5001), "long"),
        tokens("foreign", [40_000]),
        tokens("sys", SYS),
        tokens("alien", [1, 2, 3], "sys"),
        Declared("odd", PoolSpec(conversation=None, prompt="x", name="odd", branch_pos=9), "sys"),
    ]
    async with rig(tmp_path, declared=declared) as proxy:
        found = await settled(proxy)
        assert {name: one["outcome"] for name, one in found.items()} == {
            "long": "failed",
            "child": "failed",
            "foreign": "failed",
            "sys": "made",
            "alien": "failed",
            "odd": "failed",
        }
        assert "the prefix has 5000 tokens and a request has 4096" in found["long"]["reason"]
        assert found["child"]["reason"] == "its parent long is not there"
        assert "token ids of this model are 0 to" in found["foreign"]["reason"]
        assert "shares at least one token with its parent" in found["alien"]["reason"]
        assert "agree only up to position 0" in found["odd"]["reason"]
        facts = (await proxy.api.get("/polykv/health")).json()["declared"]
        assert (facts["settled"], facts["n_declared"], facts["n_there"], facts["n_failed"]) == (True, 6, 1, 5)
        assert len(proxy.runtime.declared.failures()) == 5


async def test_they_never_take_each_other_s_room(tmp_path: Path) -> None:
    """With too few sequence ids the first stay, the rest are told; pools of others go for them."""
    async with served(FakeEngine(max_pools=3), tmp_path) as server, rig(tmp_path, server=server) as proxy:
        await proxy.pool(tokens=[1, 2, 3], name="by_hand")
        declare(proxy, [tokens(name, [ord(name), *SYS]) for name in "abcd"])
        found = await settled(proxy)
        assert [found[name]["outcome"] for name in "abcd"] == ["made", "made", "made", "failed"]
        assert "3 of 3 pools are resident and none can go by itself" in found["d"]["reason"]
        assert (await proxy.api.get("/polykv/pools/by_hand")).json()["residency"] == "evicted"
        reply = await proxy.call("/completion", {"prompt": [1, 2, 3, 4], "pool_id": "by_hand", "n_predict": 1})
        assert reply.headers["x-cached-prefix-tokens"] == "3"


async def test_an_engine_that_starts_anew_gets_them_again(tmp_path: Path) -> None:
    """Without any request; what was changed by hand meanwhile stays as it is, what was released stays away."""
    async with rig(tmp_path, declared=[*TREE, tokens("gone", [1, 2])]) as proxy:
        await settled(proxy)
        await proxy.api.post("/polykv/pools/sys/unpin")
        await proxy.api.delete("/polykv/pools/gone")
        await proxy.server.crash()
        await proxy.until_unlinked()
        await proxy.server.restart()
        await proxy.until_linked(proxy.engine.boot_id)
        assert (await made_again(proxy, "task"))["n_shared"] == 30
        assert (await made_again(proxy, "sys"))["pinned"] is False
        found = await shown(proxy)
        async with asyncio.timeout(20):
            while (found := await shown(proxy))["gone"]["outcome"] != "released":
                await asyncio.sleep(0.005)
        assert (found["sys"]["pool_id"], found["gone"]["residency"]) == (1, None)


async def test_another_model_gets_pools_of_its_own(tmp_path: Path) -> None:
    """Ids of one model mean nothing to another: made from the text, under the same names."""
    async with rig(tmp_path, declared=[Declared("p", PoolSpec(prompt="one two", name="p"))]) as proxy:
        await settled(proxy)
        await proxy.server.crash()
        await proxy.until_unlinked()
        proxy.engine.fingerprint = "00000000000000bb"
        await proxy.server.restart()
        await proxy.until_linked(proxy.engine.boot_id)
        assert (await made_again(proxy, "p"))["pool_id"] == 2
        await proxy.runtime.sweep()
        await proxy.settle()
        assert [pool["pool_id"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]] == [2]


async def test_an_engine_that_dies_half_way_is_waited_for(tmp_path: Path) -> None:
    """Not settled until one boot has seen all of them."""
    engine = FakeEngine()
    engine.hold()
    async with rig(tmp_path, engine, declared=TREE) as proxy:
        async with asyncio.timeout(20):
            while "making declared pools: 0 of 2 (sys, 0 of 30 tokens)" not in proxy.runtime.declared.progress():
                await asyncio.sleep(0.005)
        await proxy.server.crash()
        await proxy.until_unlinked()
        assert not proxy.runtime.declared.settled.is_set()
        await proxy.server.restart()
        assert await outcomes(proxy) == {"sys": ("made", 2), "task": ("made", 3)}


async def test_an_engine_without_pools_settles_at_once(tmp_path: Path) -> None:
    """Stock, or started without pool ids: each says why."""
    engine = FakeEngine()
    engine.has_verbs = False
    async with rig(tmp_path, engine, declared=TREE) as proxy:
        assert "pools are off: this engine does not speak" in (await settled(proxy))["task"]["reason"]
    async with rig(tmp_path, FakeEngine(max_pools=0), declared=TREE) as proxy:
        assert "cannot hold pools" in (await settled(proxy))["sys"]["reason"]


async def test_terms_of_the_file_are_given_at_each_start(tmp_path: Path) -> None:
    """`pin: false` takes a pin away, a lease begins anew, no word leaves the pin; the time to live is always the file's."""
    clock, state = ManualClock(), tmp_path / "state"
    async with served(FakeEngine(), tmp_path) as server:
        first = [tokens(name, [ord(name)], pin=Lease(None, 50.0), ttl_s=500.0) for name in "abc"]
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=first) as proxy:
            await settled(proxy)
        clock.now += 40
        second = [tokens("a", [97], pin=False), tokens("b", [98], pin=Lease("me", 50.0)), tokens("c", [99])]
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=second) as proxy:
            await settled(proxy)
            a, b, c = (await proxy.api.get("/polykv/pools")).json()["pools"]
            assert [pool["pinned"] for pool in (a, b, c)] == [False, True, True]
            assert (b["pin_owner"], b["pin_until_ts"], c["pin_until_ts"]) == ("me", clock.now + 50, clock.now + 10)
            assert [pool["ttl_s"] for pool in (a, b, c)] == [None] * 3


async def test_a_journal_that_cannot_take_a_succession_leaves_the_old_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name stays where it was, the reason is shown, and the pool without a name goes with time."""
    async with served(FakeEngine(), tmp_path) as server, rig(tmp_path, server=server) as proxy:
        await proxy.pool(tokens=SYS, name="sys", ttl_s=77.0)

        async def full(*_: object) -> None:
            raise JournalError("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(proxy.runtime.hub.journal, "save_terms", full)
            declare(proxy, [tokens("sys", TASK)])
            assert (await settled(proxy))["sys"] == {
                "name": "sys",
                "outcome": "failed",
                "pool_id": None,
                "residency": None,
                "reason": "disk full",
            }
        was, left = (await proxy.api.get("/polykv/pools")).json()["pools"]
        assert (was["pool_id"], was["name"], was["ttl_s"], left["name"]) == (1, "sys", 77.0, None)
        proxy.clock.now += 86401
        await proxy.runtime.sweep()
        await proxy.settle()
        assert (await proxy.api.get("/polykv/pools")).json()["pools"] == []


async def test_a_refused_prefill_is_a_reason(tmp_path: Path) -> None:
    """What the engine says is shown, and the next boot tries again."""
    engine = FakeEngine()
    engine.fail_next("prefill", EngineFaultError(500, "server_error", "out of luck"))
    async with rig(tmp_path, engine, declared=[tokens("sys", SYS)]) as proxy:
        assert "out of luck" in (await settled(proxy))["sys"]["reason"]
        assert (await proxy.api.get("/polykv/pools/sys")).status_code == 404
        await engine.sleep_and_wake()
        await proxy.until_linked(engine.boot_id)
        async with asyncio.timeout(20):
            while (await shown(proxy))["sys"]["outcome"] != "made":
                await asyncio.sleep(0.005)


async def test_names_are_for_holders_of_a_key(tmp_path: Path) -> None:
    """Without one the health page has the counts alone."""
    async with rig(tmp_path, keys=Keys(frozenset({"k"})), declared=TREE) as proxy:
        await asyncio.wait_for(proxy.runtime.declared.settled.wait(), 20)
        open_facts = (await proxy.api.get("/polykv/health")).json()["declared"]
        assert open_facts == {"settled": True, "n_declared": 2, "n_there": 2, "n_failed": 0}
        keyed = (await proxy.api.get("/polykv/health", headers={"x-api-key": "k"})).json()["declared"]
        assert [one["name"] for one in keyed["pools"]] == ["sys", "task"]


async def test_one_that_is_being_made_by_another_is_waited_for(tmp_path: Path) -> None:
    """A client was first with the name: its pool is kept when it is the declared one."""
    engine = FakeEngine()
    async with rig(tmp_path, engine) as proxy:
        engine.hold()
        made = asyncio.create_task(proxy.api.post("/polykv/pools", json={"tokens": SYS, "name": "sys"}))
        while proxy.runtime.hub.ledger.tree.named("sys") is None:
            await asyncio.sleep(0)
        declare(proxy, [replace(tokens("sys", SYS), pin=Lease(None, None))])
        for _ in range(5):
            await asyncio.sleep(0)
        engine.go()
        assert (await made).status_code == 201
        assert await outcomes(proxy) == {"sys": ("kept", 1)}
        assert (await proxy.api.get("/polykv/pools/sys")).json()["pinned"] is True


def with_policy(policy: Policy | None) -> list[Declared]:
    return [replace(TREE[0], admission=policy), TREE[1]]


async def policy_of(proxy: Rig, path: str) -> tuple[float | None, int | None]:
    shown = (await proxy.api.get(path)).json()
    return shown["policy"] and shown["policy"]["target_tps_per_session"], shown["inherited_from"]


async def test_a_declared_policy_follows_the_file(tmp_path: Path) -> None:
    """Set with the pool, inherited below, changed with the file, and gone with the key; the default one likewise."""
    clock, state = ManualClock(), tmp_path / "state"
    found = []
    async with served(FakeEngine(), tmp_path) as server:
        for policy in (Policy(15.0), Policy(9.0), None):
            declared = with_policy(policy)
            async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=declared, policy=policy) as proxy:
                await settled(proxy)
                found.append([await policy_of(proxy, f"/polykv/{where}admission") for where in ("pools/sys/", "pools/task/", "")])
                assert proxy.runtime.admission.off is (policy is None)
    assert found == [
        [(15.0, None), (15.0, 1), (15.0, None)],
        [(9.0, None), (9.0, 1), (9.0, None)],
        [(None, None), (None, None), (None, None)],
    ]


async def test_of_a_policy_by_hand_and_one_by_file_the_file_wins_at_the_start(tmp_path: Path) -> None:
    """What is posted holds until then, also over another boot of the engine; where the file says nothing it stays."""
    clock, state = ManualClock(), tmp_path / "state"
    declared = with_policy(Policy(15.0))
    async with served(FakeEngine(), tmp_path) as server:
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=declared, policy=Policy(3.0)) as proxy:
            await settled(proxy)
            for path in ("pools/sys/", "pools/task/", ""):
                reply = await proxy.api.post(f"/polykv/{path}admission", json={"target_tps_per_session": 5})
                assert reply.status_code == 200
            await proxy.server.crash()
            await proxy.until_unlinked()
            server.engine.boot()
            await proxy.server.restart()
            await made_again(proxy, "task")
            assert await policy_of(proxy, "/polykv/pools/sys/admission") == (5, None)
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=declared) as proxy:
            await settled(proxy)
            assert await policy_of(proxy, "/polykv/pools/sys/admission") == (15.0, None)
            assert await policy_of(proxy, "/polykv/pools/task/admission") == (5, None)
            assert await policy_of(proxy, "/polykv/admission") == (5, None)


async def test_a_successor_takes_the_policy_over(tmp_path: Path) -> None:
    """Another text is another pool: a policy by hand goes with the name; the one of the file is the file's."""
    clock, state = ManualClock(), tmp_path / "state"
    changed = [tokens("sys", [*SYS[:-1], 1])]
    async with served(FakeEngine(max_pools=8), tmp_path) as server:
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=TREE[:1]) as proxy:
            await settled(proxy)
            await proxy.api.post("/polykv/pools/sys/admission", json={"target_tps_per_session": 5})
        async with rig(tmp_path, server=server, clock=clock, state_dir=state, declared=changed) as proxy:
            assert await outcomes(proxy) == {"sys": ("replaced", 2)}
            assert await policy_of(proxy, "/polykv/pools/2/admission") == (5, None)
