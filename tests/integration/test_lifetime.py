"""How pools live: pins and leases, eviction, retention, flush and release of subtrees, over the fake engine."""

import asyncio
from pathlib import Path

import pytest

from polykv_proxy.api.context import Keys
from polykv_proxy.core.ledger import LedgerLimits
from polykv_proxy.errors import JournalError
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import Rig, rig, served

BASE = list(range(100, 140))


async def tree(proxy: Rig) -> list[int]:
    """1 ─ 2 ─ 3 and 1 ─ 4, of 40, 42, 44 and 31 tokens; their ids."""
    ids = [(await proxy.pool(tokens=BASE))["pool_id"]]
    for parent, tokens in ((0, [*BASE, 5, 6]), (1, [*BASE, 5, 6, 7, 8]), (0, [*BASE[:30], 9])):
        reply = await proxy.api.post(f"/polykv/pools/{ids[parent]}/fork", json={"tokens": tokens})
        assert reply.status_code == 201, reply.text
        ids.append(reply.json()["pool_id"])
    return ids


async def verb(proxy: Rig, pool: object, name: str, **body: object) -> tuple[int, dict]:
    reply = await proxy.api.post(f"/polykv/pools/{pool}/{name}", json=body)
    return reply.status_code, reply.json()


async def residencies(proxy: Rig) -> dict[int, str]:
    return {p["pool_id"]: p["residency"] for p in (await proxy.api.get("/polykv/pools")).json()["pools"]}


async def use(proxy: Rig, pool: int, prompt: list[int], **body: object) -> str:
    reply = await proxy.call("/completion", {"prompt": prompt, "pool_id": pool, "n_predict": 1, **body})
    assert reply.status_code == 200, reply.text
    await proxy.settle()
    return reply.headers["x-cached-prefix-tokens"]


async def test_an_evicted_pool_keeps_its_tokens_and_comes_back_when_used(tmp_path: Path) -> None:
    """Evict frees the cells; the next attach computes the own tokens again. A second evict has nothing to do."""
    async with rig(tmp_path) as proxy:
        await tree(proxy)
        assert await verb(proxy, 3, "evict") == (200, {"pool_id": 3, "name": None, "evicted": True})
        assert (await verb(proxy, 3, "evict"))[1]["evicted"] is False
        assert proxy.engine.used_cells() == 43
        shown = (await proxy.api.get("/polykv/pools/3")).json()
        assert (shown["residency"], shown["own_kv_bytes"], shown["prefix_len"]) == ("evicted", 0, 44)
        proxy.engine.computed = 0
        assert await use(proxy, 3, [*BASE, 5, 6, 7, 8, 1]) == "44"
        assert proxy.engine.computed == 2 + 1


async def test_a_request_that_paid_for_a_rebuild_is_no_hit(tmp_path: Path) -> None:
    """What had to be computed again for a request is not counted as saved; the reply says so, and the next one is a hit."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)

        async def counts() -> list[int]:
            shown = (await proxy.api.get("/polykv/pools/1")).json()
            return [shown[key] for key in ("n_queries", "n_hits", "n_tokens_shared", "n_rebuilds")]

        async def told(prompt: list[int]) -> object:
            for slot in proxy.engine.slots:
                slot.clear()
            reply = await proxy.call("/completion", {"prompt": prompt, "pool_id": 1, "n_predict": 1})
            await proxy.settle()
            return reply.json()["opencoti"].get("rebuilt")

        assert (await told([*BASE, 1]), await counts()) == (None, [1, 1, 40, 0])
        await verb(proxy, 1, "evict")
        assert (await told([*BASE, 1]), await counts()) == (True, [2, 1, 40, 1])
        assert (await told([*BASE, 1]), await counts()) == (None, [3, 2, 80, 1])


@pytest.mark.parametrize("name", ["evict", "flush"])
async def test_fields_of_a_verb_that_takes_none_are_refused(tmp_path: Path, name: str) -> None:
    """They are no wish that goes unheard; an empty body and an empty object are fine."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=[1, 2])
        reply = await proxy.api.post(f"/polykv/pools/1/{name}", json={"recursive": True})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "recursive")
        assert reply.json()["error"]["message"] == "unknown field recursive; this verb takes none"
        assert (await proxy.api.post(f"/polykv/pools/1/{name}", content=b"{")).status_code == 400
        assert (await proxy.api.get("/polykv/pools/1")).json()["residency"] == "resident"
        assert (await proxy.api.post(f"/polykv/pools/1/{name}", json={})).status_code == 200
        assert (await proxy.api.post(f"/polykv/pools/1/{name}")).status_code == 200


async def test_what_is_in_use_is_not_evicted_and_its_users_are_named(tmp_path: Path) -> None:
    """Children with KV, running requests, attached sessions and pins are 409, each with the way out."""
    async with rig(tmp_path) as proxy:
        await tree(proxy)
        status, reply = await verb(proxy, 1, "evict")
        assert (status, reply["error"]["code"], reply["error"]["children"]) == (409, "pool_has_children", [2, 4])
        await use(proxy, 3, [*BASE, 5, 6, 7, 8, 1], session_id="a")
        status, reply = await verb(proxy, 3, "evict")
        assert (status, reply["error"]["code"], reply["error"]["sessions"]) == (409, "pool_busy", ["a"])
        await proxy.api.delete("/polykv/sessions/a")
        await verb(proxy, 3, "pin", owner="ann")
        status, reply = await verb(proxy, 3, "evict")
        assert (status, reply["error"]["code"], reply["error"]["owner"]) == (409, "pool_pinned", "ann")
        await verb(proxy, 3, "unpin")
        proxy.engine.hold()
        call = asyncio.ensure_future(proxy.call("/completion", {"prompt": [*BASE, 5, 6, 7, 8, 1], "pool_id": 3, "n_predict": 1}))
        async with asyncio.timeout(20):
            while all(slot.state == "idle" for slot in proxy.engine.slots):
                await asyncio.sleep(0.005)
        status, reply = await verb(proxy, 3, "evict")
        assert (status, reply["error"]["code"], reply["error"]["n_running"]) == (409, "pool_busy", 1)
        proxy.engine.go()
        assert (await call).status_code == 200
        await proxy.settle()
        assert (await verb(proxy, 3, "evict"))[0] == 200


async def test_a_flush_evicts_what_is_idle_leaf_first(tmp_path: Path) -> None:
    """Kept pools keep their parents; the reply says which and why. The next flush takes the rest."""
    async with rig(tmp_path) as proxy:
        await tree(proxy)
        await use(proxy, 4, [*BASE[:30], 9, 1], session_id="a")
        status, reply = await verb(proxy, 1, "flush")
        assert (status, reply["evicted"]) == (200, [3, 2])
        assert reply["kept"] == [{"pool_id": 1, "kept_by": "in_use_below"}, {"pool_id": 4, "kept_by": "attached"}]
        assert await residencies(proxy) == {1: "resident", 2: "evicted", 3: "evicted", 4: "resident"}
        await proxy.api.delete("/polykv/sessions/a")
        assert (await verb(proxy, 1, "flush"))[1]["evicted"] == [4, 1]
        assert proxy.engine.used_cells() == 0


async def test_idle_pools_make_room_for_new_ones(tmp_path: Path) -> None:
    """With all ids taken the idle leaf least worth keeping goes, never what is pinned, used or above something."""
    async with rig(tmp_path) as proxy:
        await tree(proxy)
        proxy.clock.now += 100
        await proxy.pool(tokens=[50, 51, 52])
        assert await residencies(proxy) == {1: "resident", 2: "resident", 3: "resident", 4: "evicted", 5: "resident"}
        assert (await verb(proxy, 3, "pin"))[1]["pin_until_ts"] == proxy.clock.now + 600
        await use(proxy, 5, [50, 51, 52, 1], session_id="a")
        full = await proxy.api.post("/polykv/pools", json={"tokens": [60, 61]})
        assert (full.status_code, full.json()["error"]["code"]) == (429, "pool_seqs_exhausted")
        assert await use(proxy, 4, [*BASE[:30], 9, 1]) == "0"
        await proxy.api.delete("/polykv/sessions/a")
        assert (await proxy.api.post("/polykv/pools", json={"tokens": [60, 61]})).status_code == 429, "within its grace"
        proxy.clock.now += 31
        for slot in proxy.engine.slots:
            slot.clear()
        assert await use(proxy, 4, [*BASE[:30], 9, 1]) == "31"
        assert (await residencies(proxy))[5] == "evicted"


async def test_an_idle_leaf_goes_at_once_and_one_just_left_says_when(tmp_path: Path) -> None:
    """Being young keeps no pool, in the same instant neither; the grace after a use does, and the refusal says how long to wait."""
    async with rig(tmp_path, FakeEngine(max_pools=1), limits=LedgerLimits(pool_grace_s=30.0)) as proxy:
        for n in range(3):
            await proxy.pool(tokens=[n, 7])
        assert await residencies(proxy) == {1: "evicted", 2: "evicted", 3: "resident"}
        await use(proxy, 3, [2, 7, 1])
        proxy.clock.now += 12.5
        full = await proxy.api.post("/polykv/pools", json={"tokens": [9, 9]})
        assert (full.status_code, full.headers["retry-after"]) == (429, "18")
        assert "wait 18 s (--pool-grace-s after the last use of one)" in full.json()["error"]["message"]
        proxy.clock.now += 18
        await verb(proxy, (await proxy.pool(tokens=[9, 9]))["pool_id"], "pin")
        full = await proxy.api.post("/polykv/pools", json={"tokens": [8, 8]})
        assert (full.headers["retry-after"], "wait" in full.json()["error"]["message"]) == ("5", False)


async def test_a_lease_ends_by_itself(tmp_path: Path) -> None:
    """After its lease a pin no longer holds; without a lease only the admin key pins, and it holds."""
    async with rig(tmp_path, FakeEngine(max_pools=1), keys=Keys(frozenset({"k"}), "boss")) as proxy:
        proxy.api.headers["x-api-key"] = "k"
        await proxy.pool(tokens=BASE)
        assert (await verb(proxy, 1, "pin", owner="ann", lease=10.0))[1]["pin_owner"] == "ann"
        assert (await proxy.api.post("/polykv/pools", json={"tokens": [60, 61]})).status_code == 429
        proxy.clock.now += 11
        await proxy.runtime.sweep()
        assert (await proxy.api.get("/polykv/pools/1")).json()["pinned"] is False
        assert (await verb(proxy, 1, "pin", lease="none"))[0] == 403
        proxy.api.headers["x-api-key"] = "boss"
        assert (await verb(proxy, 1, "pin", lease="none"))[1]["pin_until_ts"] is None
        shown = (await proxy.api.get("/polykv/pools/1")).json()
        assert (shown["pinned"], shown["orphaned_pin"], shown["kept_by"]) == (True, True, "pinned")
        error = (await verb(proxy, 1, "unpin", owner="eve"))[1]["error"]
        assert (error["owner"], error["message"].partition(";")[0]) == (None, "pool 1 is pinned by nobody by name, not by 'eve'")
        assert (await verb(proxy, 1, "unpin"))[1]["pinned"] is False


@pytest.mark.parametrize("body", [{"lease": 0}, {"lease": "forever"}, {"lease": None}, {"owner": ""}, {"who": "x"}, {"owner": 5}])
async def test_a_bad_pin_is_400_and_pins_nothing(tmp_path: Path, body: dict) -> None:
    """The field that is wrong is named."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        status, reply = await verb(proxy, 1, "pin", **body)
        assert status == 400
        assert next(iter(body)) in reply["error"]["param"]
        assert (await proxy.api.get("/polykv/pools/1")).json()["pinned"] is False


async def test_pins_and_leases_survive_a_restart(tmp_path: Path) -> None:
    """The journal holds owner and end of lease."""
    engine = FakeEngine()
    async with served(engine, tmp_path) as server:
        async with rig(tmp_path, engine, server, state_dir=tmp_path / "s") as proxy:
            await proxy.pool(tokens=BASE)
            await verb(proxy, 1, "pin", owner="ann", lease=60.0)
            before = (await proxy.api.get("/polykv/pools/1")).json()
        async with rig(tmp_path, engine, server, state_dir=tmp_path / "s") as proxy:
            assert (await proxy.api.get("/polykv/pools/1")).json() == before


async def test_a_subtree_goes_only_when_nobody_uses_it(tmp_path: Path) -> None:
    """Release is leaf first; recursive is all or nothing; over pins only with the admin key."""
    async with rig(tmp_path) as proxy:
        await tree(proxy)
        refused = await proxy.api.delete("/polykv/pools/1")
        assert (refused.status_code, refused.json()["error"]["children"]) == (409, [2, 4])
        await use(proxy, 3, [*BASE, 5, 6, 7, 8, 1], session_id="a")
        refused = await proxy.api.delete("/polykv/pools/1?recursive=1")
        assert (refused.status_code, refused.json()["error"]["sessions"], refused.json()["error"]["pool_id"]) == (409, ["a"], 3)
        assert set((await residencies(proxy)).values()) == {"resident"}
        await proxy.api.delete("/polykv/sessions/a")
        await verb(proxy, 2, "pin")
        assert (await proxy.api.delete("/polykv/pools/1?recursive=1")).json()["error"]["code"] == "pool_pinned"
        gone = await proxy.api.delete("/polykv/pools/1?recursive=1&over_pins=1")
        assert (gone.status_code, gone.json()["released_pools"]) == (200, [4, 3, 2, 1])
        assert (await residencies(proxy), proxy.engine.seqs, proxy.engine.used_cells()) == ({}, {}, 0)
        assert (await proxy.api.delete("/polykv/pools/1?recursive=1")).status_code == 404
        assert (await proxy.api.delete("/polykv/pools/1?over_pins=1")).status_code == 400


async def test_a_pinned_pool_is_not_released(tmp_path: Path) -> None:
    """A pin holds against release and against the end of `ttl_s`."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE, ttl_s=5.0)
        await verb(proxy, 1, "pin", lease=20.0)
        assert (await proxy.api.delete("/polykv/pools/1")).json()["error"]["code"] == "pool_pinned"
        proxy.clock.now += 6
        await proxy.runtime.sweep()
        await proxy.settle()
        assert list(await residencies(proxy)) == [1]
        proxy.clock.now += 20
        for _ in "ab":
            await proxy.runtime.sweep()
            await proxy.settle()
        assert await residencies(proxy) == {}


async def test_times_to_live_end_leaf_first_and_can_be_renewed(tmp_path: Path) -> None:
    """A parent outlives its children; renew counts from now, with the old length or a new one."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE, ttl_s=5.0)
        await proxy.api.post("/polykv/pools/1/fork", json={"tokens": [*BASE, 5], "ttl_s": 10.0})
        proxy.clock.now += 6
        await proxy.runtime.sweep()
        await proxy.settle()
        assert list(await residencies(proxy)) == [1, 2]
        assert (await verb(proxy, 2, "renew", ttl_s=4.0))[1]["ttl_s"] == 4.0
        assert (await verb(proxy, 1, "renew"))[1]["ttl_s"] == 5.0
        proxy.clock.now += 4.5
        await proxy.runtime.sweep()
        await proxy.settle()
        assert list(await residencies(proxy)) == [1]
        proxy.clock.now += 1
        await proxy.runtime.sweep()
        await proxy.settle()
        assert await residencies(proxy) == {}


async def test_an_eviction_that_the_engine_does_not_answer_loses_no_sequence(tmp_path: Path) -> None:
    """When freeing fails half way the pool is evicted in the books and a sweep gives its sequence back."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        proxy.engine.fail_next("free", EngineFaultError(500, "server_error", "no"))
        assert (await verb(proxy, 1, "evict"))[0] == 200
        assert len(proxy.engine.seqs) == 1
        await proxy.runtime.sweep()
        await proxy.settle()
        assert len(proxy.engine.seqs) == 0
        assert await use(proxy, 1, [*BASE, 1]) == "40"


async def test_an_eviction_for_room_that_fails_is_not_repeated_on_others(tmp_path: Path) -> None:
    """One pool goes at most when the engine does not take its sequence back; the caller hears of it."""
    async with rig(tmp_path) as proxy:
        for n in range(4):
            await proxy.pool(tokens=[50 + n, 60])
        proxy.engine.fail_next("free", EngineFaultError(500, "server_error", "no"))
        full = await proxy.api.post("/polykv/pools", json={"tokens": [70, 71]})
        assert full.status_code == 429
        assert sorted((await residencies(proxy)).values()) == ["evicted", "resident", "resident", "resident"]


async def test_what_cannot_be_written_down_did_not_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full disk pins, renewals and recursive releases are 507 and leave the tree as it was."""
    async with rig(tmp_path) as proxy:
        await tree(proxy)

        async def full(*_args: object) -> None:
            raise JournalError("full")

        for name in ("save_pool", "update_pool", "drop_pools"):
            monkeypatch.setattr(proxy.runtime.hub.journal, name, full)
        before = (await proxy.api.get("/polykv/pools")).json()["pools"]
        assert (await verb(proxy, 1, "pin"))[0] == 507
        assert (await verb(proxy, 1, "renew", ttl_s=5.0))[0] == 507
        assert (await proxy.api.delete("/polykv/pools/1?recursive=1")).status_code == 507
        after = (await proxy.api.get("/polykv/pools")).json()["pools"]
        assert [{**p, "last_access_ts": 0} for p in after] == [{**p, "last_access_ts": 0} for p in before]


async def test_cells_come_from_idle_pools_before_anybody_suffers(tmp_path: Path) -> None:
    """A prefill that would not fit beside what is used evicts idle pools first; when all are kept it is 429, nobody is hurt."""
    async with rig(tmp_path, FakeEngine(n_ctx=200), limits=LedgerLimits()) as proxy:
        await proxy.pool(tokens=list(range(100, 200)))
        proxy.clock.now += 60
        await proxy.pool(tokens=list(range(300, 420)))
        assert await residencies(proxy) == {1: "evicted", 2: "resident"}
        await verb(proxy, 2, "pin")
        full = await proxy.api.post("/polykv/pools", json={"tokens": list(range(500, 600))})
        assert (full.status_code, full.json()["error"]["code"]) == (429, "saturated")
        assert "retry-after" in full.headers
        assert await use(proxy, 2, [*range(300, 420), 1]) == "120"


async def test_a_model_without_cells_evicts_nothing_for_them(tmp_path: Path) -> None:
    """A recurrent engine says that it has no cells; a pool made there needs a sequence id and nothing else."""
    async with rig(tmp_path) as proxy:
        state = proxy.engine.state
        proxy.engine.state = lambda: {**state(), "cells": {"used": 2, "total": 0}}  # type: ignore[method-assign]
        await proxy.pool(tokens=BASE)
        await proxy.pool(tokens=[50, 51])
        await proxy.runtime.sweep()
        assert set((await residencies(proxy)).values()) == {"resident"}


async def test_two_callers_at_once_get_one_outcome(tmp_path: Path) -> None:
    """Evict, flush, release and fork of the same pools at once: each is done or refused, and books and engine agree."""
    async with rig(tmp_path) as proxy:
        for _ in range(5):
            ids = await tree(proxy)
            calls = [
                proxy.api.delete(f"/polykv/pools/{ids[0]}?recursive=1"),
                proxy.api.post(f"/polykv/pools/{ids[0]}/flush"),
                proxy.api.post(f"/polykv/pools/{ids[2]}/evict"),
                proxy.api.delete(f"/polykv/pools/{ids[2]}"),
                proxy.api.post(f"/polykv/pools/{ids[2]}/fork", json={"tokens": [*BASE, 5, 6, 7, 8, 9]}),
                proxy.call("/completion", {"prompt": [*BASE, 5, 6, 1], "pool_id": ids[1], "n_predict": 1}),
            ]
            replies = await asyncio.gather(*calls)
            assert all(reply.status_code in {200, 201, 202, 404, 409} for reply in replies), [r.text for r in replies]
            await proxy.settle()
            held = {str(pool.seq) for pool in proxy.runtime.hub.ledger.tree if pool.seq is not None}
            assert {seq.ref for seq in proxy.engine.seqs.values()} == held
            for pool in reversed(list(proxy.runtime.hub.ledger.tree)):
                assert (await proxy.api.delete(f"/polykv/pools/{pool.pool_id}")).status_code == 200
            assert proxy.engine.seqs == {}
