"""Releasing pools, listing and ending sessions, capacity, health and keys."""

import asyncio
from pathlib import Path

import pytest

from polykv_proxy.api.context import Keys
from polykv_proxy.core.ledger import LedgerLimits
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, rig

SYSTEM = "You are a careful agent with many tools and a long memory"


async def running(proxy: Rig, **fields: object) -> asyncio.Task:
    """A request that the engine holds in mid-generation."""
    proxy.engine.hold()
    task = asyncio.ensure_future(proxy.call("/completion", {"prompt": SYSTEM + " x", "n_predict": 3, **fields}))
    async with asyncio.timeout(20):
        while all(slot.state == "idle" for slot in proxy.engine.slots):
            await asyncio.sleep(0.005)
    return task


async def test_an_unused_pool_is_released_at_once(tmp_path: Path) -> None:
    """DELETE gives the sequence back, the name and the id are free and gone, a second DELETE is 404, and the id never returns."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM, name="agents")
        reply = await proxy.api.delete("/polykv/pools/agents")
        assert (reply.status_code, reply.json()["released"], reply.json()["pool_id"]) == (200, True, 1)
        assert proxy.engine.seqs == {}
        for key in ("agents", "1"):
            assert (await proxy.api.delete(f"/polykv/pools/{key}")).status_code == 404
        assert (await proxy.pool(prompt=SYSTEM, name="agents"))["pool_id"] == 2


async def test_a_pool_in_use_is_released_with_its_last_request(tmp_path: Path) -> None:
    """202 while requests run; new ones are 409; idle sessions are detached at once; the sequence goes with the last book."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        await proxy.call("/completion", {"prompt": SYSTEM + " y", "pool_id": 1, "session_id": "idle"})
        await proxy.settle()
        call = await running(proxy, pool_id=1, session_id="busy")
        reply = await proxy.api.delete("/polykv/pools/1")
        assert (reply.status_code, reply.json()["residency"], reply.json()["n_running"]) == (202, "releasing", 1)
        assert reply.json()["detached_sessions"] == ["idle"]
        late = await proxy.call("/completion", {"prompt": "z", "pool_id": 1})
        assert (late.status_code, late.json()["error"]["code"]) == (409, "pool_releasing")
        assert (await proxy.api.delete("/polykv/pools/1")).status_code == 409
        assert len(proxy.engine.seqs) == 1
        proxy.engine.go()
        assert (await call).status_code == 200
        await proxy.settle()
        assert (proxy.engine.seqs, (await proxy.api.get("/polykv/pools/1")).status_code) == ({}, 404)
        sessions = (await proxy.api.get("/polykv/sessions")).json()["sessions"]
        assert {(s["session_id"], s["pool_id"]) for s in sessions} == {("idle", None), ("busy", None)}


async def test_sessions_show_what_their_slots_hold(tmp_path: Path) -> None:
    """A named session has its pool, slot, context and state; a running request without a name is an ephemeral session."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt=SYSTEM)
        await proxy.call("/completion", {"prompt": SYSTEM + " y", "pool_id": 1, "session_id": "a b/c", "n_predict": 3})
        await proxy.settle()
        call = await running(proxy, pool_id=1)
        listed = (await proxy.api.get("/polykv/sessions")).json()["sessions"]
        assert [(s["session_id"], s["ephemeral"], s["state"], s["pool_id"], s["n_slots"]) for s in listed] == [
            ("a b/c", False, "idle", 1, 1),
            (None, True, "warming", 1, 1),
        ]
        one = (await proxy.api.get("/polykv/sessions/a b/c")).json()
        assert (one["pool_id"], one["n_streams"], one["n_turns"], one["resident"]) == (1, 0, 1, True)
        assert (one["ctx_used"], one["n_shared"]) == (pool["prefix_len"] + 4, pool["prefix_len"])
        assert one["tps_last_turn"] > 0
        proxy.engine.go()
        await call


async def test_a_session_s_next_turn_computes_only_its_news(tmp_path: Path) -> None:
    """The second turn of a session finds its first turn's cells, and its reply knows the session's last pace."""
    async with rig(tmp_path) as proxy:
        first = await proxy.call("/completion", {"prompt": SYSTEM, "n_predict": 2, "session_id": "s"})
        await proxy.settle()
        before = proxy.engine.computed
        second = await proxy.call("/completion", {"prompt": SYSTEM + " w0 w1 and then", "n_predict": 1}, {"x-session-id": "s"})
        assert proxy.engine.computed - before == 2
        assert first.headers["x-session-id"] == "s"
        assert float(second.headers["x-session-tps"]) > 0
        assert (second.headers["x-session-id"], second.json()["opencoti"]["session_id"]) == ("s", "s")


async def test_ending_a_session_cancels_and_frees(tmp_path: Path) -> None:
    """DELETE cancels the session's request, frees its cells, and forgets the name; its number is not used again."""
    async with rig(tmp_path) as proxy:
        call = await running(proxy, session_id="s")
        number = proxy.engine.slots[0].session or next(slot.session for slot in proxy.engine.slots if slot.session)
        reply = await proxy.api.delete("/polykv/sessions/s")
        assert (reply.status_code, reply.json()["cancelled"]) == (200, 1)
        assert reply.json()["cells_freed"] > 0
        proxy.engine.go()
        assert (await call).json()["stop_type"] == "cancelled"
        await proxy.settle()
        assert len(proxy.runtime.hub.ledger.books) == 0
        assert (await proxy.api.delete("/polykv/sessions/s")).status_code == 404
        await proxy.call("/completion", {"prompt": "hi", "session_id": "s"})
        assert {slot.session for slot in proxy.engine.slots} - {0, number} != set()


async def test_idle_sessions_end_by_time(tmp_path: Path) -> None:
    """After its TTL an idle session is gone and its cells are free; a used one stays."""
    async with rig(tmp_path, limits=LedgerLimits(session_ttl_s=60)) as proxy:
        for name in ("old", "new"):
            await proxy.call("/completion", {"prompt": f"{name} text", "session_id": name})
        await proxy.settle()
        proxy.clock.now += 40
        await proxy.call("/completion", {"prompt": "new text again", "session_id": "new"})
        await proxy.settle()
        proxy.clock.now += 30
        await proxy.runtime.sweep()
        await proxy.runtime.hub.settle()
        sessions = (await proxy.api.get("/polykv/sessions")).json()["sessions"]
        assert [s["session_id"] for s in sessions] == ["new"]
        assert sum(bool(slot.session) for slot in proxy.engine.slots) == 1


async def test_a_pool_with_a_ttl_goes_when_unused(tmp_path: Path) -> None:
    """`ttl_s` counts from the last use and releases the pool; without it a pool stays."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM, ttl_s=100)
        await proxy.pool(prompt="stays")
        proxy.clock.now += 90
        await proxy.call("/completion", {"prompt": SYSTEM + " x", "pool_id": 1})
        await proxy.settle()
        proxy.clock.now += 90
        await proxy.runtime.sweep()
        await proxy.runtime.hub.settle()
        assert (await proxy.api.get("/polykv/pools/1")).status_code == 200
        proxy.clock.now += 20
        await proxy.runtime.sweep()
        await proxy.runtime.hub.settle()
        assert [pool["pool_id"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]] == [2]


async def test_two_streams_of_one_session_both_run(tmp_path: Path) -> None:
    """A second request of a busy session runs on another slot, and the session counts both."""
    async with rig(tmp_path) as proxy:
        first = await running(proxy, session_id="s")
        second = asyncio.ensure_future(proxy.call("/completion", {"prompt": "other", "session_id": "s"}))
        async with asyncio.timeout(20):
            while sum(slot.state != "idle" for slot in proxy.engine.slots) < 2:
                await asyncio.sleep(0.005)
        shown = (await proxy.api.get("/polykv/sessions/s")).json()
        assert (shown["n_streams"], shown["n_slots"]) == (2, 2)
        proxy.engine.go()
        await asyncio.gather(first, second)
        await proxy.settle()
        assert (await proxy.api.get("/polykv/sessions/s")).json()["n_streams"] == 0


async def test_cells_are_the_pool_plus_the_suffixes(tmp_path: Path) -> None:
    """N sessions on one pool use its cells once: used = P + the sum of private suffixes."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt=SYSTEM)
        for n in range(4):
            await proxy.call("/completion", {"prompt": f"{SYSTEM} agent {n}", "n_predict": 5, "pool_id": 1, "session_id": f"s{n}"})
        await proxy.settle()
        capacity = (await proxy.api.get("/polykv/capacity")).json()
        assert capacity["cells_used"] == pool["prefix_len"] + 4 * 7
        facts = {
            key: capacity[key] for key in ("seq_ids_used", "seq_ids_max", "slots_busy", "slots_total", "n_sessions", "n_requests")
        }
        assert facts == {"seq_ids_used": 1, "seq_ids_max": 4, "slots_busy": 0, "slots_total": 4, "n_sessions": 4, "n_requests": 0}
        shown = (await proxy.api.get("/polykv/pools")).json()
        assert shown["pools"][0]["own_kv_bytes"] == pool["prefix_len"] * 100
        assert {s["suffix_n_tokens"] for s in shown["pools"][0]["sessions"]} == {7}


async def test_an_engine_without_verbs_answers_501_with_the_remedy(tmp_path: Path) -> None:
    """A stock engine: our verbs are 501 and name the remedy, health says off, and requests pass untouched."""
    engine = FakeEngine()
    engine.has_verbs = False
    async with rig(tmp_path, engine) as proxy:
        for method, path in (("GET", "pools"), ("POST", "pools"), ("GET", "sessions"), ("DELETE", "pools/1"), ("GET", "capacity")):
            reply = await proxy.api.request(method, f"/polykv/{path}")
            assert (reply.status_code, reply.json()["error"]["code"]) == (501, "pools_unsupported")
            assert reply.json()["error"]["message"].endswith("; run an engine that has them")
        health = await proxy.api.get("/polykv/health")
        assert (health.status_code, health.json()["pools"]["state"]) == (200, "off")
        plain = await proxy.call("/completion", {"prompt": "hi", "pool_id": 1})
        assert (plain.status_code, "opencoti" in plain.json()) == (200, False)


async def test_an_engine_of_another_major_version_is_left_alone(tmp_path: Path) -> None:
    """An unknown major protocol is refused with both versions named."""
    engine = FakeEngine()
    engine.major = 2
    async with rig(tmp_path, engine) as proxy:
        message = (await proxy.api.get("/polykv/pools")).json()["error"]["message"]
        assert "version 2" in message
        assert "version 1" in message


@pytest.mark.parametrize("headers", [{"authorization": "Bearer secret"}, {"x-api-key": "secret"}, {"authorization": "bearer root"}])
async def test_the_api_key_opens_our_verbs(tmp_path: Path, headers: dict[str, str]) -> None:
    """The engine's key and the admin key open them, nothing else does; health is open, without the engine's last lines."""
    engine = FakeEngine()
    engine.api_key = "secret"
    keys = Keys(frozenset({"secret"}), "root")
    async with rig(tmp_path, engine, keys=keys) as proxy:
        assert (await proxy.api.get("/polykv/pools", headers=headers)).status_code == 200
        for wrong in ({}, {"authorization": "Bearer nope"}, {"x-api-key": ""}):
            reply = await proxy.api.get("/polykv/pools", headers=wrong)
            assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
        assert (await proxy.api.get("/polykv/health")).status_code == 200


async def test_unknown_paths_and_methods_are_openai_shaped(tmp_path: Path) -> None:
    """404 and 405 of our own paths have the one error shape."""
    async with rig(tmp_path) as proxy:
        missing = await proxy.api.get("/polykv/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        wrong = await proxy.api.put("/polykv/pools")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("session_id", [".", "..", "a/../b", "a b?c&d#e%2F", "plain"])
async def test_every_session_can_be_ended_by_its_id_in_the_query(tmp_path: Path, session_id: str) -> None:
    """Whatever a client's path rules do to its id; without an id the answer says how."""
    async with rig(tmp_path) as proxy:
        await proxy.call("/completion", {"prompt": SYSTEM, "session_id": session_id})
        await proxy.settle()
        reply = await proxy.api.delete("/polykv/sessions", params={"session_id": session_id})
        assert (reply.status_code, reply.json()["session_id"], reply.json()["ended"]) == (200, session_id, True)
        assert (await proxy.api.get("/polykv/sessions")).json()["sessions"] == []
        unknown = await proxy.api.delete("/polykv/sessions", params={"session_id": session_id})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")
        for query in ("", "?session_id="):
            error = (await proxy.api.delete(f"/polykv/sessions{query}")).json()["error"]
            assert (error["code"], error["param"]) == ("invalid_request", "session_id")
