"""Admission over the fake engine: who is let in, who waits, who is refused, and that nothing stays reserved."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from polykv_proxy.core.admission.gate import Limits
from polykv_proxy.runtime.admission import DOUBT_S
from polykv_proxy.runtime.load import load_of
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, relayed, rig, steps

POOL = list(range(100, 140))
FLOOR = {"target_tps_per_session": 5000, "mode": "enforced", "settle_tokens": 8}
"""Nobody can have so many: a token takes a millisecond of the fake engine's clock."""
PASSED = {"target_tps_per_session": 1, "mode": "enforced", "settle_tokens": 8}


async def until(proxy: Rig, holds: Callable[[], object]) -> None:
    """Time passes until it holds."""
    async with asyncio.timeout(20):
        while not holds():
            proxy.clock.now += 0.01
            proxy.runtime.admission.wake()
            await asyncio.sleep(0.005)


def start(proxy: Rig, session: str | None, n: int = 400, **more: object) -> asyncio.Task[httpx.Response]:
    """A request that runs until it has so many tokens."""
    body = {"prompt": [*POOL, 7], "n_predict": n, "pool_id": 1, **more}
    if session is not None:
        body["session_id"] = session
    return asyncio.ensure_future(proxy.call("/completion", body))


async def settled(proxy: Rig, session: str) -> asyncio.Task[httpx.Response]:
    """A session that decodes and whose effect is measured, on an engine that stands still."""
    proxy.engine.hold()
    task = start(proxy, session)
    await until(proxy, lambda: reserved(proxy))
    while not settled_down(proxy):
        await steps(proxy.engine, 1)
        proxy.clock.now += 0.01
        await asyncio.sleep(0.005)
    return task


def settled_down(proxy: Rig) -> bool:
    """Is a mean known, and nobody's effect awaited?"""
    load = load_of(proxy.runtime.hub, proxy.runtime.hub.telemetry.live.state)
    forecasts = proxy.runtime.admission.gate.outlook.forecasts.values()
    return load is not None and load.mean_active_tps is not None and not any(one.settling for one in forecasts)


def reserved(proxy: Rig) -> int:
    return len(proxy.runtime.admission.gate.outlook.reservations)


def waiting(proxy: Rig) -> int:
    return len(proxy.runtime.admission.gate.lines)


async def at_rest(proxy: Rig) -> None:
    """All books are closed, and with them all reservations."""
    proxy.engine.go()
    await until(proxy, lambda: not len(proxy.runtime.hub.ledger.books))
    assert (reserved(proxy), waiting(proxy)) == (0, 0)


async def policy(proxy: Rig, **fields: object) -> dict:
    reply = await proxy.api.post("/polykv/pools/1/admission", json=fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_policy_is_set_changed_inherited_and_removed(tmp_path: Path) -> None:
    """It outlives the proxy, holds below, and goes with its pool."""
    engine = FakeEngine()
    async with rig(tmp_path, engine, state_dir=tmp_path / "state") as proxy:
        await proxy.pool(tokens=POOL, name="base")
        assert (await proxy.api.get("/polykv/pools/1/admission")).json()["policy"] is None
        assert (await policy(proxy, target_tps_per_session=15))["policy"]["mode"] == "advisory"
        changed = await policy(proxy, mode="enforced", on_saturation="queue")
        assert (changed["policy"]["target_tps_per_session"], changed["policy"]["on_saturation"]) == (15, "queue")
        await proxy.api.post("/polykv/pools/1/fork", json={"tokens": [*POOL, 1], "name": "child"})
        shown = (await proxy.api.get("/polykv/pools/child/admission")).json()
        assert (shown["inherited_from"], shown["policy"]["target_tps_per_session"]) == (1, 15)
    async with rig(tmp_path, engine, state_dir=tmp_path / "state") as proxy:
        began = proxy.runtime.hub.telemetry.news.seq
        assert (await proxy.api.get("/polykv/pools/base/admission")).json()["policy"]["on_saturation"] == "queue"
        assert (await proxy.api.delete("/polykv/pools/1/admission")).json() == {
            "pool_id": 1, "name": "base", "policy": None, "inherited_from": None, "removed": True,
        }  # fmt: skip
        told = [json.loads(event.text) for event in proxy.runtime.hub.telemetry.news.after(began) or [] if event.topic == "policy"]
        assert [(one["type"], one["pool_id"], one["name"]) for one in told] == [("removed", 1, "base")]
        assert told[0]["policy"]["target_tps_per_session"] == 15
        await policy(proxy, target_tps_per_session=15)
        assert (await proxy.api.delete("/polykv/pools/1?recursive=1")).status_code == 200
        await proxy.runtime.hub.settle()
    async with rig(tmp_path, engine, state_dir=tmp_path / "state") as proxy:
        assert proxy.runtime.admission.off


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "target_tps_per_session"),
        ({"target_tps_per_session": 0}, "target_tps_per_session"),
        ({"target_tps_per_session": True}, "target_tps_per_session"),
        ({"target_tps_per_session": 5, "mode": "strict"}, "mode"),
        ({"target_tps_per_session": 5, "settle_tokens": 1.5}, "settle_tokens"),
        ({"target_tps_per_session": 5, "protect_floors": True}, "protect_floors"),
        ({"target_tps_per_session": 5, "color": 1}, "color"),
    ],
)
async def test_what_makes_no_sense_is_named(tmp_path: Path, body: dict, field: str) -> None:
    """400 with the field, and nothing has changed."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        reply = await proxy.api.post("/polykv/pools/1/admission", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
        assert proxy.runtime.admission.off


async def test_who_would_break_the_floor_is_refused_and_told_why(tmp_path: Path) -> None:
    """429 with arm, value and threshold; a known session goes on, overcommit starts, and all is given back."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        await policy(proxy, **FLOOR)
        first = await settled(proxy, "a")
        reply = await start(proxy, "b")
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["type"]) == (429, "saturated", "rate_limit_error")
        assert (error["arm"], error["reason"], error["threshold"]) == ("floor", "projected mean tps below floor", 5000)
        assert error["value"] == pytest.approx(500, rel=0.1)
        assert 1 <= int(reply.headers["retry-after"]) == error["retry_after"] <= 60
        assert (error["headroom_sessions"], "x-should-retry" in reply.headers) == (0, False)
        assert proxy.runtime.hub.ledger.sessions.get("b") is None
        again, more = start(proxy, "a", 3), start(proxy, "c", 3, overcommit=True)
        await until(proxy, lambda: reserved(proxy) == 3)
        proxy.engine.go()
        assert [reply.status_code for reply in await asyncio.gather(first, again, more)] == [200, 200, 200]
        await at_rest(proxy)
        shown = (await proxy.api.get("/polykv/decisions")).json()
        assert [(one["arm"], one["outcome"], one["session_id"]) for one in shown["decisions"]] == [
            ("overcommit", "admitted", "c"),
            ("continuation", "admitted", "a"),
            ("floor", "rejected", "b"),
            ("guarantee", "admitted", "a"),
        ]


async def test_a_warning_lets_in_and_says_so(tmp_path: Path) -> None:
    """A header and two words in the reply."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        await policy(proxy, **FLOOR, on_saturation="warn")
        first = await settled(proxy, "a")
        second = start(proxy, "b", 3)
        await until(proxy, lambda: reserved(proxy) == 2)
        proxy.engine.go()
        reply = await second
        assert (reply.status_code, reply.headers["x-sessions-remaining"]) == (200, "0")
        assert (reply.json()["opencoti"]["backpressure"], reply.json()["opencoti"]["headroom_sessions"]) == ("warned", 0)
        assert (await first).json()["opencoti"]["backpressure"] == "none"
        await at_rest(proxy)


async def test_a_queue_is_served_when_there_is_room(tmp_path: Path) -> None:
    """Position and deadline are visible; who ends makes room, by the guarantee here; who leaves leaves nothing."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        await policy(proxy, **FLOOR, on_saturation="queue", queue_timeout_ms=600_000)
        first = await settled(proxy, "a")
        second, third = start(proxy, "b", 3), start(proxy, "c", 3)
        await until(proxy, lambda: waiting(proxy) == 2)
        queue = (await proxy.api.get("/polykv/pools/1/admission")).json()["queue"]
        assert [(one["session_id"], one["position"], one["arm"]) for one in queue] == [("b", 1, "floor"), ("c", 2, "floor")]
        second.cancel()
        await until(proxy, lambda: waiting(proxy) == 1)
        proxy.engine.go()
        assert (await first).status_code == 200
        assert not third.done()
        await proxy.runtime.end_session("a")
        assert (await third).json()["opencoti"]["backpressure"] == "held"
        await at_rest(proxy)
        shown = (await proxy.api.get("/polykv/decisions")).json()["decisions"]
        assert {one["session_id"]: one["outcome"] for one in shown} == {"a": "admitted", "b": "cancelled", "c": "admitted"}


async def test_a_queue_ends_in_time_and_has_an_end(tmp_path: Path) -> None:
    """Who waits too long, and who finds it full, gets 429."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        await policy(proxy, **FLOOR, on_saturation="queue", queue_timeout_ms=5000, max_queue=1, fail_fast=True)
        first = await settled(proxy, "a")
        second = start(proxy, "b")
        await until(proxy, lambda: waiting(proxy) == 1)
        full = await start(proxy, "c")
        assert (full.status_code, full.headers["x-should-retry"]) == (429, "false")
        proxy.clock.now += 6
        await until(proxy, second.done)
        assert (await second).status_code == 429
        proxy.engine.go()
        await first
        await at_rest(proxy)


async def test_settling_holds_and_then_the_floor_decides(tmp_path: Path) -> None:
    """A second session waits for what the first one costs, and is let in when the floor holds."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        await policy(proxy, **PASSED)
        proxy.engine.hold()
        first, second = start(proxy, "a", 20), start(proxy, "b", 3)
        await until(proxy, lambda: waiting(proxy) == 1)
        shown = (await proxy.api.get("/polykv/pools/1/capacity")).json()
        assert (shown["can_admit"], shown["reason"], shown["settling"]) == (False, "measurement settling", True)
        proxy.engine.go()
        assert [reply.status_code for reply in await asyncio.gather(first, second)] == [200, 200]
        await at_rest(proxy)


async def test_the_queue_outlives_the_engine(tmp_path: Path) -> None:
    """Another boot: those who wait go on waiting, and are let in there, where nothing is known of any speed yet."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        await policy(proxy, **FLOOR, on_saturation="queue", queue_timeout_ms=600_000)
        first = await settled(proxy, "a")
        second = start(proxy, "b", 3)
        await until(proxy, lambda: waiting(proxy) == 1)
        first.cancel()
        proxy.engine.boot()
        proxy.engine.go()
        await proxy.until_linked(proxy.engine.boot_id)
        await until(proxy, second.done)
        assert (await second).status_code == 200
        await at_rest(proxy)


async def test_many_at_once_never_overshoot(tmp_path: Path) -> None:
    """64 arrivals, three may run: no more than three ever do, everybody is served, nothing stays."""
    async with rig(tmp_path, admission=Limits(max_running=3)) as proxy:
        await proxy.pool(tokens=POOL)
        most = 0
        tasks = [start(proxy, None, 5) for _ in range(64)]
        while not all(task.done() for task in tasks):
            most = max(most, len(proxy.runtime.hub.ledger.books))
            await asyncio.sleep(0)
        assert (most, {task.result().status_code for task in tasks}) == (3, {200})
        await at_rest(proxy)


async def test_nobody_is_sent_after_a_broken_connection(tmp_path: Path) -> None:
    """What a dying engine ends makes room on it; who waits is let in when it has shown that it lives."""
    async with rig(tmp_path, admission=Limits(max_running=1)) as proxy:
        admission = proxy.runtime.admission
        first, _ = await proxy.runtime.requests.enter_plain()
        second = asyncio.ensure_future(proxy.runtime.requests.enter_plain())
        await until(proxy, lambda: len(admission.gate.lines) == 1)
        admission.doubt()
        admission.over(first)
        assert (len(admission.gate.lines), reserved(proxy)) == (1, 0)
        proxy.clock.now += DOUBT_S
        admission.wake()
        assert (len(admission.gate.lines), reserved(proxy)) == (0, 1)
        admission.over((await second)[0])
        await at_rest(proxy)


async def test_a_default_policy_rules_plain_requests(tmp_path: Path) -> None:
    """Without one a plain request is nobody's business, with one it is counted and told so."""
    async with rig(tmp_path) as proxy:
        plain = {"prompt": "one two", "n_predict": 2}
        assert "opencoti" not in (await proxy.call("/completion", plain)).json()
        assert (await proxy.api.post("/polykv/admission", json=PASSED)).status_code == 200
        assert (await proxy.call("/completion", plain)).json()["opencoti"]["backpressure"] == "none"
        await at_rest(proxy)
        assert (await proxy.api.delete("/polykv/admission")).json()["removed"] is True
        assert "opencoti" not in (await proxy.call("/completion", plain)).json()


async def test_advice_is_counted_and_holds_nobody_up(tmp_path: Path) -> None:
    """An advisory policy says what it would have done."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        await policy(proxy, **{**FLOOR, "mode": "advisory"})
        first = await settled(proxy, "a")
        second = start(proxy, "b", 3)
        await until(proxy, lambda: reserved(proxy) == 2)
        proxy.engine.go()
        assert [(await task).status_code for task in (first, second)] == [200, 200]
        shown = (await proxy.api.get("/polykv/decisions")).json()
        assert shown["decisions"][0]["would"] == "rejected"
        assert {"arm": "floor", "would": "rejected", "n": 1} in shown["counts"]
        await at_rest(proxy)


async def test_what_never_fits_is_the_engine_s_to_say(tmp_path: Path) -> None:
    """No 429 for a prompt that is longer than any slot."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        await policy(proxy, **FLOOR)
        reply = await proxy.call("/completion", {"prompt": [*POOL, *range(200, 5200)], "pool_id": 1, "session_id": "a"})
        assert reply.status_code == 400
        await at_rest(proxy)


@pytest.mark.parametrize(("word", "sign"), [("comments", ": waiting"), ("chunks", '"choices":[]')])
async def test_a_stream_that_waits_shows_that_it_lives(tmp_path: Path, word: str, sign: str) -> None:
    """The event stream begins before the engine has answered, and goes on with the engine's events, or ends with one error."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        await proxy.pool(messages=[{"role": "system", "content": "one two three"}])
        await policy(proxy, **FLOOR, on_saturation="queue", while_held=word, queue_timeout_ms=5000)
        first = await settled(proxy, "a")
        late = asyncio.ensure_future(_lines(client, _chat("b")))
        await until(proxy, lambda: waiting(proxy) == 1)
        proxy.clock.now += 6
        await until(proxy, late.done)
        assert sign in (await late)[0]
        assert json.loads((await late)[-1].removeprefix("data: "))["error"]["code"] == "saturated"
        second = asyncio.ensure_future(_lines(client, _chat("c")))
        await until(proxy, lambda: waiting(proxy) == 1)
        proxy.engine.go()
        await first
        await proxy.runtime.end_session("a")
        assert sign in (await second)[0]
        assert '"opencoti"' in (await second)[-1]
        await at_rest(proxy)


def _chat(session: str) -> dict[str, object]:
    messages = [{"role": "system", "content": "one two three"}, {"role": "user", "content": "four"}]
    return {"messages": messages, "max_tokens": 2, "stream": True, "pool_id": 1, "session_id": session}


async def _lines(client: httpx.AsyncClient, body: dict[str, object]) -> list[str]:
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        return [line async for line in reply.aiter_lines() if line]


async def test_a_conversation_without_a_name_goes_on(tmp_path: Path) -> None:
    """Its next prompt begins with the last one, which a slot still holds; another conversation is a new session."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        await policy(proxy, **FLOOR, guarantee_min_sessions=1)
        turn = {"pool_id": 1, "n_predict": 2}
        assert (await proxy.call("/completion", {**turn, "prompt": [*POOL, 50, 51]})).status_code == 200
        await at_rest(proxy)
        first = await settled(proxy, "a")
        replies = [
            asyncio.ensure_future(proxy.call("/completion", {**turn, "prompt": [*POOL, *more]}))
            for more in ([50, 51, 9, 10], [50, 9, 9, 10], [50])
        ]
        await until(proxy, lambda: sum(reply.done() for reply in replies) == 2)
        proxy.engine.go()
        assert [(await reply).status_code for reply in replies] == [200, 429, 429]
        assert (await first).status_code == 200
        await at_rest(proxy)


async def test_without_policies_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the gate nor, for its sake, the engine: plain and pooled requests go as they went before there was any."""

    asked = []
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        for name in ("ask", "wake", "closed", "next_wake"):
            monkeypatch.setattr(proxy.runtime.admission.gate, name, lambda *_, name=name: asked.append(name))
        monkeypatch.setattr(proxy.runtime.hub.client, "dry_run", lambda *_: asked.append("dry_run"))
        assert (await proxy.call("/completion", {"prompt": "one", "n_predict": 2})).status_code == 200
        assert (await start(proxy, "a", 2)).status_code == 200
        await proxy.settle()
        assert asked == []
        monkeypatch.undo()
