"""The courier of examples/ before a whole proxy side and a fake engine that shares a thousand tokens a second among its slots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from examples.courier.courier import AllAtOnce, ByCapacity, Courier, Pacing
from examples.courier.journal import Journal
from examples.courier.proxy import Proxy
from examples.courier.work import RULES, Package, packages
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import ManualClock, Rig, relayed, rig

OUT_OF_REACH = 5000.0


class RealClock(ManualClock):
    """Time as it passes."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class Unhurried(FakeEngine):
    """A step takes a millisecond, and not only says so: looks and counters come many times in an answer."""

    async def gate(self) -> None:
        await super().gate()
        await asyncio.sleep(0.001)


@asynccontextmanager
async def couriered(folder: Path, **policy: object) -> AsyncIterator[tuple[Rig, Proxy]]:
    """A pool with a policy; afterwards no session is left, and nothing is reserved or waits."""
    async with rig(folder, Unhurried(n_slots=8, n_ctx=65536), clock=RealClock()) as proxy, relayed(proxy) as (_, client):
        pool = await Proxy.with_pool(client, RULES)
        await pool.set_policy(settle_tokens=8, **policy)
        yield proxy, pool
        await proxy.settle()
        gate = proxy.runtime.admission.gate
        assert (len(proxy.runtime.hub.ledger.sessions), len(gate.outlook.reservations), len(gate.lines)) == (0, 0, 0)
        assert len(gate.outlook.attached) == 0


async def deliver(pool: Proxy, work: list[Package], pacing: Pacing, floor: float) -> Journal:
    journal = Journal(floor)
    async with asyncio.timeout(120):
        await Courier(pool, journal, RULES, pacing, look_s=0.01).deliver(work)
    assert journal.figures()["delivered"] == len(work)
    return journal


async def test_each_start_is_of_a_settled_report_of_its_own(tmp_path: Path) -> None:
    """With a floor that all can have they come to run side by side, one after the other."""
    async with couriered(tmp_path, target_tps_per_session=1) as (_, pool):
        journal = await deliver(pool, packages(4, 2, max_tokens=300, tools_s=0.0), ByCapacity(), 1.0)
    spawns = [event.t for event in journal.events if event.kind == "spawn"]
    made_from = [max((said for said in journal.reports if journal.since(said.ts) <= t), key=lambda said: said.ts) for t in spawns]
    assert len({said.ts for said in made_from}) == 4
    assert all(said.can_admit and not said.settling and said.n_warming == 0 for said in made_from)
    assert max(said.n_pool_sessions for said in journal.reports) > 1


async def test_with_a_floor_out_of_reach_one_runs_at_a_time(tmp_path: Path) -> None:
    """The guaranteed one; the next when it has gone. Nobody is refused, for nobody asks in vain."""
    async with couriered(tmp_path, target_tps_per_session=OUT_OF_REACH) as (_, pool):
        journal = await deliver(pool, packages(3, 2, max_tokens=200, tools_s=0.0), ByCapacity(), OUT_OF_REACH)
    figures = journal.figures()
    assert max(said.n_pool_sessions for said in journal.reports) == 1
    assert (figures["refused"], figures["failed"], figures["guaranteed"]) == (0, 0, 3)


async def test_a_queue_holds_those_who_all_ask_at_once(tmp_path: Path) -> None:
    """All are served, nobody is refused, and the journal knows who was held."""
    async with couriered(tmp_path, target_tps_per_session=OUT_OF_REACH, mode="enforced", on_saturation="queue") as (_, pool):
        journal = await deliver(pool, packages(4, 2, max_tokens=50, tools_s=0.0), AllAtOnce(), OUT_OF_REACH)
    figures = journal.figures()
    assert (figures["held"], figures["refused"]) == (3, 0)
    assert figures["guaranteed"]


async def test_an_urgent_package_starts_at_once_and_is_counted(tmp_path: Path) -> None:
    """Whatever the floor says; others then wait for a report that shows it."""
    async with couriered(tmp_path, target_tps_per_session=OUT_OF_REACH, mode="enforced") as (_, pool):
        journal = await deliver(pool, packages(3, 1, n_urgent=2, max_tokens=50), ByCapacity(), OUT_OF_REACH)
    figures = journal.figures()
    assert (figures["overcommitted"], figures["guaranteed"], figures["refused"]) == (2, 1, 0)
