"""The system's clock is set, by seconds or by years, forward or back: nothing is held longer than it would be, no figure is odd.

What a time to live, or a lease, promises ends with a clock that is set forward: those are instants. Nothing else does.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from polykv_proxy.core.ledger import LedgerLimits
from polykv_proxy.ports import Plan
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.fakes.product import product
from tests.integration.rig import ManualClock, Rig, relay_request, rig, served
from tests.models import tiny_model

HOUR_S, YEAR_S = 3600.0, 365 * 86400.0
BACK = [-3.0, -HOUR_S, -20 * YEAR_S]
STEPS = [*BACK, 3.0, HOUR_S, 20 * YEAR_S]


class SetClock(ManualClock):
    """One whose time of day is set while its steady time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.set_by = 0.0

    def wall(self) -> float:
        return self.now + self.set_by


async def later(proxy: Rig, seconds: float) -> None:
    proxy.clock.now += seconds
    await proxy.runtime.sweep()
    await proxy.runtime.hub.settle()


@pytest.mark.parametrize("step_s", STEPS)
async def test_a_request_that_nobody_saw_lets_go_as_ever(tmp_path: Path, step_s: float) -> None:
    """The clock is set right after it ended: the first sweep after two seconds more gives its pool back."""
    clock = SetClock()
    async with rig(tmp_path, clock=clock) as proxy:
        await proxy.pool(prompt="a shared beginning", name="p")
        plan = await proxy.gate.plan(relay_request(b'{"prompt": "x", "pool_id": "p"}'), lambda _: None)
        assert isinstance(plan, Plan)
        plan.done()
        clock.set_by = step_s
        await later(proxy, 0)
        await later(proxy, 2)
        assert (await proxy.api.get("/polykv/capacity")).json()["n_requests"] == 0
        assert (await proxy.api.delete("/polykv/pools/p")).status_code == 200


@pytest.mark.parametrize("step_s", BACK)
async def test_idle_sessions_and_unused_pools_end_after_their_time(tmp_path: Path, step_s: float) -> None:
    """Set back: they live as long as they would, counted from there at most; also pools of a journal that is younger than now."""
    clock = SetClock()
    engine, limits = FakeEngine(), LedgerLimits(session_ttl_s=100)
    async with served(engine, tmp_path) as server:
        async with rig(tmp_path, server=server, clock=clock, limits=limits, state_dir=tmp_path / "state") as proxy:
            await proxy.pool(prompt="one two", name="p", ttl_s=100)
            await proxy.call("/completion", {"prompt": "one two three", "n_predict": 1, "session_id": "s"})
            await proxy.settle()
            clock.set_by = step_s
            await later(proxy, 99)
            assert (await proxy.api.get("/polykv/sessions")).json()["sessions"] != []
            assert (await proxy.api.get("/polykv/pools")).json()["pools"] != []
            await later(proxy, 100)
            assert (await proxy.api.get("/polykv/sessions")).json()["sessions"] == []
            assert (await proxy.api.get("/polykv/pools")).json()["pools"] == []
            await proxy.pool(prompt="one two", name="p", ttl_s=100)
        clock.set_by += step_s
        async with rig(tmp_path, server=server, clock=clock, limits=limits, state_dir=tmp_path / "state") as proxy:
            await later(proxy, 1)
            await later(proxy, 100)
            assert (await proxy.api.get("/polykv/pools")).json()["pools"] == []


@pytest.mark.parametrize("step_s", BACK)
async def test_idle_pools_make_room_as_ever(tmp_path: Path, step_s: float) -> None:
    """Set back after their last user left: their grace is over when it would be, and a new pool gets its place."""
    clock = SetClock()
    async with rig(tmp_path, FakeEngine(max_pools=1), clock=clock, limits=LedgerLimits(pool_grace_s=30)) as proxy:
        await proxy.pool(prompt="one two", name="old")
        await proxy.call("/completion", {"prompt": "one two three", "n_predict": 1, "pool_id": "old"})
        await proxy.settle()
        clock.set_by = step_s
        await later(proxy, 0)
        await later(proxy, 31)
        await proxy.pool(prompt="another", name="new")


@pytest.mark.parametrize("step_s", BACK)
async def test_what_could_not_be_made_goes_as_ever(tmp_path: Path, step_s: float) -> None:
    """A pool that failed after a 202 is forgotten five minutes later at most, whatever the clock says."""
    clock = SetClock()
    async with rig(tmp_path, clock=clock) as proxy:
        proxy.engine.fail_next("prefill", EngineFaultError(422, "too_long", "it does not fit"))
        assert (await proxy.api.post("/polykv/pools?wait=0", json={"prompt": "one two", "name": "p"})).status_code == 202
        async with asyncio.timeout(20):
            while (await proxy.api.get("/polykv/pools/p")).json()["residency"] != "failed":
                await asyncio.sleep(0.005)
        clock.set_by = step_s
        await later(proxy, 310)
        assert (await proxy.api.get("/polykv/pools")).json()["pools"] == []


@pytest.mark.parametrize("step_s", STEPS)
async def test_speeds_events_and_listings_stay_whole(tmp_path: Path, step_s: float) -> None:
    """Set in mid-answer: the turn is told with figures that can be, events keep their order, and all that is shown is JSON."""
    clock = SetClock()
    async with rig(tmp_path, clock=clock) as proxy:
        await proxy.pool(prompt="one two", name="p")
        proxy.engine.hold()
        body = {"prompt": "one two three", "n_predict": 5, "pool_id": "p", "session_id": "s"}
        turn = asyncio.ensure_future(proxy.call("/completion", body))
        async with asyncio.timeout(20):
            while all(slot.state == "idle" for slot in proxy.engine.slots):
                await asyncio.sleep(0.005)
        clock.set_by = step_s
        clock.now += 1
        proxy.engine.go()
        assert (await turn).status_code == 200
        await proxy.settle()
        for page in ("pools", "sessions", "sessions/s", "capacity", "tps?once=1", "savings", "admission", "decisions"):
            reply = await proxy.api.get(f"/polykv/{page}")
            assert reply.status_code == 200, (page, reply.text)
            _sane(json.loads(reply.text, parse_constant=pytest.fail))
        ring = list(proxy.runtime.hub.telemetry.news._ring)
        assert [one.seq for one in ring] == sorted(one.seq for one in ring)


def _sane(found: object, name: str = "") -> None:
    """No duration or speed below nothing."""
    if isinstance(found, dict):
        for key, value in found.items():
            _sane(value, key)
    elif isinstance(found, list):
        for value in found:
            _sane(value, name)
    elif isinstance(found, int | float) and name.endswith(("_ms", "_s", "_tps", "_ewma")):
        assert found >= 0, name


@pytest.mark.engine
def test_the_whole_product_under_a_set_clock(engine_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxy and engine, with Debian's libfaketime: turns, pool and speeds go on, no restart, and the page of metrics is there."""
    library = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
    if library is None:
        pytest.skip("libfaketime is not installed (Debian: apt-get install libfaketime)")
    clock = tmp_path / "clock"
    clock.write_text("+0")
    steady = {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1", "FAKETIME_NO_CACHE": "1"}
    for name, value in {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": clock, **steady}.items():
        monkeypatch.setenv(name, str(value))
    tokens = list(range(600, 700))
    with product(engine_path, tiny_model("full"), tmp_path, args=["-c", 2048, "-np", 2]) as proxy:
        proxy.pool(tokens=tokens, name="p", ttl_s=30 * YEAR_S)
        for step, by_s in (("-1h", -HOUR_S), ("-10y", -10 * YEAR_S), ("+1h", HOUR_S), ("+10y", 10 * YEAR_S), ("+0", 0.0)):
            clock.write_text(step)
            body = {"prompt": [*tokens, 7], "n_predict": 50, "ignore_eos": True, "pool_id": "p", "session_id": "s"}
            reply = proxy.http.post("/completion", json=body)
            assert (reply.status_code, reply.headers["x-cached-prefix-tokens"]) == (200, str(len(tokens)))
            proxy.settled()
            _sane(proxy.get("/polykv/sessions/s"))
            proxy.until(lambda by_s=by_s: abs(proxy.get("/polykv/tps?once=1")["ts"] - time.time() - by_s) < HOUR_S / 2)  # type: ignore[misc]
        assert (proxy.get("/polykv/health")["restarts"], proxy.get("/polykv/pools/p")["residency"]) == (0, "resident")
        assert proxy.http.get("/metrics").status_code == 200
