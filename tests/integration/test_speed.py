"""Speeds of sessions, as the view shows them, over the fake engine: a token takes a millisecond of its clock."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from polykv_proxy.engine.wire import Cells, SlotState, State
from polykv_proxy.ports import Plan
from polykv_proxy.runtime.rows import SessionRow, StateView
from polykv_proxy.runtime.view import View
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, relay_request, rig, steps

TOKENS_PER_S = 1000.0


async def until(proxy: Rig, holds: Callable[[StateView], object]) -> StateView:
    """The first view in which it holds, by what was heard of the engine."""
    async with asyncio.timeout(20):
        while True:
            proxy.clock.now += 0.1
            view = proxy.runtime.glance.now()
            if holds(view):
                return view
            await asyncio.sleep(0.005)


def of(view: StateView, session_id: str) -> SessionRow:
    return next(row for row in view.sessions if row.session_id == session_id)


def ask(proxy: Rig, session: str, n: int, prompt: str = "one two three") -> Awaitable[object]:
    return asyncio.ensure_future(proxy.call("/completion", {"prompt": prompt, "session_id": session, "n_predict": n}))


async def test_a_session_is_warming_then_active_then_idle_with_its_last_figures(tmp_path: Path) -> None:
    """Without a figure it warms and is in no mean; with one it counts; after the turn figures stay and only the state changes."""
    async with rig(tmp_path) as proxy:
        proxy.engine.hold()
        asked = ask(proxy, "a", 60)
        view = await until(proxy, lambda view: any(row.state == "warming" and row.resident for row in view.sessions))
        assert (view.whole.n_active, view.whole.n_warming, view.whole.mean_active_tps) == (0, 1, None)
        assert of(view, "a").tps_ewma is None
        await steps(proxy.engine, 30)
        view = await until(proxy, lambda view: of(view, "a").state == "active")
        assert view.whole.mean_active_tps == of(view, "a").tps_ewma == pytest.approx(TOKENS_PER_S)
        assert (view.whole.n_active, view.whole.n_warming) == (1, 0)
        proxy.engine.go()
        await asked
        view = await until(proxy, lambda view: of(view, "a").state == "idle")
        row = of(view, "a")
        assert (row.tps_ewma, row.tps_last_turn, row.tpot_ms) == (pytest.approx(TOKENS_PER_S), pytest.approx(TOKENS_PER_S), 1.0)
        assert row.ttft_ms is not None
        assert row.ttft_ms > 0
        assert (view.whole.n_active, view.whole.mean_active_tps) == (0, None)
        view = await until(proxy, lambda view: view.whole.slots_busy == 0)
        assert (row.ctx_used, row.ctx_total, row.ctx_headroom_tokens) == (row.ctx_used, 4096, 4096 - row.ctx_used)


async def test_in_its_next_prompt_a_session_is_not_in_the_mean(tmp_path: Path) -> None:
    """An old figure is shown and does not count until the first token is out."""
    async with rig(tmp_path) as proxy:
        await proxy.call("/completion", {"prompt": "one two", "session_id": "a", "n_predict": 40})
        await proxy.settle()
        proxy.engine.hold()
        asked = ask(proxy, "a", 3)
        view = await until(proxy, lambda view: view.whole.n_warming == 1)
        assert of(view, "a").tps_ewma == pytest.approx(TOKENS_PER_S)
        assert view.whole.mean_active_tps is None
        proxy.engine.go()
        await asked


async def test_requests_without_a_session_are_counted_and_forgotten(tmp_path: Path) -> None:
    """They are shown while they run, by pool where they named one, and leave nothing behind."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt="one two three four")
        proxy.engine.hold()
        body = {"prompt": "one two three four five", "n_predict": 60, "pool_id": pool["pool_id"]}
        asked = [asyncio.ensure_future(proxy.call("/completion", one)) for one in (body, {**body, "pool_id": None})]
        await until(proxy, lambda view: view.whole.slots_busy == 2)
        await steps(proxy.engine, 40)
        view = await until(proxy, lambda view: view.whole.n_active == 2)
        assert sorted(row.pool_id is None for row in view.sessions) == [False, True]
        assert {(row.session_id, row.ephemeral) for row in view.sessions} == {(None, True)}
        assert view.whole.mean_active_tps is not None
        proxy.engine.go()
        await asyncio.gather(*asked)
        view = await until(proxy, lambda view: view.whole.slots_busy == 0)
        assert view.sessions == ()


async def test_many_looks_are_one(tmp_path: Path) -> None:
    """Within a tick everybody sees the same view; the next tick has a new one with a larger number."""
    async with rig(tmp_path) as proxy:
        first = proxy.runtime.glance.now()
        assert all(proxy.runtime.glance.now() is first for _ in range(100))
        proxy.clock.now += 0.1
        second = proxy.runtime.glance.now()
        assert second.seq > first.seq
        assert second.ts > first.ts


async def test_who_rests_costs_a_look_nothing_and_changes_when_it_does(tmp_path: Path) -> None:
    """Rows of sessions without cells are made once; with a turn, an end or another pool there is a new one."""
    async with rig(tmp_path, FakeEngine(n_slots=1)) as proxy:
        pool = await proxy.pool(prompt="one two three four", name="p")
        for name in ("a", "b", "c"):
            await proxy.call("/completion", {"prompt": f"{name} one two", "session_id": name, "n_predict": 9, "pool_id": "p"})
            await proxy.settle()
        before, after = await proxy.runtime.look(), await proxy.runtime.look()
        assert [of(after, name) is of(before, name) for name in ("a", "b", "c")] == [True, True, False]
        assert of(after, "c").resident
        listed = [{row.session_id: row for row in view.pool(pool["pool_id"]).sessions} for view in (before, after)]
        assert [listed[0][name] is listed[1][name] for name in ("a", "b", "c")] == [True, True, False]
        await proxy.call("/completion", {"prompt": "a one two", "session_id": "a", "n_predict": 20})
        await proxy.settle()
        view = await proxy.runtime.look()
        assert (of(view, "a").n_turns, of(view, "a").resident, of(view, "c").resident) == (2, True, False)
        assert of(view, "b") is of(before, "b")


async def test_rows_are_those_of_a_first_look(tmp_path: Path) -> None:
    """Whatever happens, and however often somebody has looked: nothing that is shown is out of date."""
    rng = random.Random(7)
    async with rig(tmp_path, FakeEngine(n_slots=2)) as proxy:
        hub = proxy.runtime.hub
        for n in range(80):
            name = f"s{rng.randrange(6)}"
            body = {"prompt": f"one two {name}", "session_id": name, "n_predict": rng.randrange(1, 20)}
            act = rng.randrange(8)
            if act < 5:
                await proxy.call("/completion", {**body, "pool_id": "p"} if act < 2 and "p" in pools(proxy) else body)
            elif act == 5:
                await proxy.api.delete(f"/polykv/sessions/{name}")
            elif act == 6 and "p" in pools(proxy):
                await proxy.api.delete("/polykv/pools/p")
            else:
                await proxy.api.post("/polykv/pools", json={"prompt": "one two three", "name": "p"})
            if rng.random() < 0.7:
                await proxy.settle()
            if n == 40:
                await proxy.settle()
                proxy.engine.boot()
                await proxy.until_linked(proxy.engine.boot_id)
            proxy.clock.now += rng.random()
            state = await hub.state() if rng.random() < 0.5 else hub.telemetry.live.state
            fresh = View(hub.ledger, hub.telemetry, hub.clock).look(hub.hello, state)
            assert replace(proxy.runtime.view.look(hub.hello, state), seq=0) == replace(fresh, seq=0)


def pools(proxy: Rig) -> set[str | None]:
    return {pool.name for pool in proxy.runtime.hub.ledger.tree}


async def test_cells_of_nobody_press_nobody(tmp_path: Path) -> None:
    """What an idle slot keeps for no session is free; a session's cells are not, nor are those that a running slot holds."""
    async with rig(tmp_path) as proxy:
        await proxy.call("/completion", {"prompt": "one", "session_id": "a", "n_predict": 2})
        await proxy.settle()
        number = next(iter(proxy.runtime.hub.ledger.sessions)).number

        def pressure(**facts: Any) -> float:
            slots = [SlotState(slot=0, n_tokens=60, own_cells=60, **facts)]
            state = State(boot_id="b", update=1, slots=slots, cells=Cells(used=90, total=100))
            return proxy.runtime.view.look(None, state).whole.compaction_pressure

        assert pressure(state="idle") == 0
        assert pressure(state="idle", session=number) == pytest.approx(0.6)
        assert pressure(state="generating") == pytest.approx(0.6)


async def test_the_same_things_have_the_same_figures_everywhere(tmp_path: Path) -> None:
    """Listings of pools and sessions, the session itself and the speeds are of one model."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt="one two three four")
        body = {"prompt": "one two three four five", "n_predict": 40, "pool_id": pool["pool_id"], "session_id": "a"}
        await proxy.call("/completion", body)
        await proxy.settle()
        again = await proxy.call("/completion", body)
        assert float(again.headers["x-session-tps"]) == pytest.approx(TOKENS_PER_S)
        await proxy.settle()
        listed = (await proxy.api.get("/polykv/sessions")).json()["sessions"]
        alone = (await proxy.api.get("/polykv/sessions/a")).json()
        (of_pool,) = (await proxy.api.get(f"/polykv/pools/{pool['pool_id']}")).json()["sessions"]
        assert listed == [{key: value for key, value in alone.items() if key not in {"seq", "ts"}}]
        assert (of_pool["tps_ewma"], of_pool["ttft_ms"]) == (alone["tps_ewma"], alone["ttft_ms"])


async def test_a_request_of_no_session_has_its_own_pace(tmp_path: Path) -> None:
    """Once its slot is known to have worked for it; what the slot did for others is not told as its pace."""
    async with rig(tmp_path, FakeEngine(n_slots=1)) as proxy:
        await proxy.pool(prompt="one two three four", name="p")
        body = json.dumps({"prompt": "one two three four five", "n_predict": 40, "pool_id": "p"}).encode()
        plan = await proxy.gate.plan(relay_request(body), lambda _: None)
        assert isinstance(plan, Plan)
        begun = [(b"x-polykv-slot", b"0"), (b"x-polykv-shared", b"4")]
        assert b"x-session-tps" not in dict(plan.reply_headers(200, begun))
        other = await proxy.call("/completion", {"prompt": "six seven", "n_predict": 40, "session_id": "a"})
        await proxy.settle()
        assert other.status_code == 200
        assert b"x-session-tps" not in dict(plan.reply_headers(200, begun))
        transport = httpx.AsyncHTTPTransport(uds=str(proxy.server.path))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as engine:
            reply = await engine.post("/completion", content=body, headers=[*plan.engine_headers])
        plan.done()
        await proxy.settle()
        told = dict(plan.reply_headers(200, [(name.lower(), value) for name, value in reply.headers.raw]))
        assert float(told[b"x-session-tps"]) == pytest.approx(TOKENS_PER_S)
        assert b"x-session-id" not in told


async def test_a_lost_engine_leaves_what_is_known(tmp_path: Path) -> None:
    """Sessions keep their figures and are nowhere; the view says that nobody is followed."""
    async with rig(tmp_path) as proxy:
        await proxy.call("/completion", {"prompt": "one two", "session_id": "a", "n_predict": 40})
        await proxy.settle()
        await proxy.server.stop()
        await proxy.until_unlinked()
        view = await until(proxy, lambda view: not view.linked)
        row = of(view, "a")
        assert (row.resident, row.slot, row.ctx_used) == (False, None, 0)
        assert row.tps_ewma == pytest.approx(TOKENS_PER_S)
        assert view.whole.slots_busy == 0
