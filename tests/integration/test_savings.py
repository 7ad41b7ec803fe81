"""Savings over the fake engine, over days, restarts and full disks."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from polykv_proxy.errors import JournalError
from polykv_proxy.runtime import savings
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import ManualClock, Rig, rig, served

BASE = list(range(100, 140))


async def ask(proxy: Rig, pool: str, prompt: list[int]) -> None:
    await proxy.call("/completion", {"prompt": prompt, "pool_id": pool, "n_predict": 2})
    await proxy.settle()


async def page(proxy: Rig, query: str = "") -> dict[str, Any]:
    proxy.clock.now += 0.1
    return (await proxy.api.get(f"/polykv/savings{query}")).json()


async def test_hits_and_misses_stand_beside_each_other_everywhere(tmp_path: Path) -> None:
    """Per pool in the listing, per pool and day on the page, all together in the speeds."""
    async with rig(tmp_path, FakeEngine(n_slots=1)) as proxy:
        await proxy.pool(tokens=BASE, name="p")
        await ask(proxy, "p", [*BASE, 5, 6])
        await ask(proxy, "p", list(range(300, 330)))
        await proxy.api.post("/polykv/pools/p/evict")
        await ask(proxy, "p", [*BASE, 7, 8])
        shown = await page(proxy)
        assert (shown["n_requests"], shown["n_tokens"]) == (1, 40)
        assert {reason: miss["n_requests"] for reason, miss in shown["misses"].items()} == {"token_mismatch": 1, "rebuilt": 1}
        assert shown["misses"]["token_mismatch"]["n_tokens"] == 30
        (day,) = shown["days"]
        ((pool),) = day["pools"]
        assert (pool["pool_id"], pool["name"], pool["n_tokens"]) == (1, "p", 40)
        assert {key: value for key, value in day.items() if key not in {"day", "pools"}} == {
            key: value for key, value in pool.items() if key not in {"pool_id", "name"}
        }
        listed = (await proxy.api.get("/polykv/pools/p")).json()["savings"]
        assert listed == {key: shown[key] for key in ("n_requests", "n_tokens", "seconds", "misses")}
        whole = (await proxy.api.get("/polykv/tps?once=1")).json()
        assert (whole["saved_tokens"], whole["saved_s"]) == (40, shown["seconds"])


async def test_they_outlive_the_proxy_and_their_pools(tmp_path: Path) -> None:
    """After a restart sums go on; a released pool's days stay, under its id, without a name."""
    clock = ManualClock()
    state = tmp_path / "state"
    async with served(FakeEngine(), tmp_path) as server:
        async with rig(tmp_path, server=server, clock=clock, state_dir=state) as proxy:
            await proxy.pool(tokens=BASE, name="p")
            await proxy.pool(tokens=[7, 8, 9], name="q")
            await ask(proxy, "p", [*BASE, 5])
            await ask(proxy, "q", [7, 8, 9, 10])
        clock.now += 86400
        async with rig(tmp_path, server=server, clock=clock, state_dir=state) as proxy:
            assert (await proxy.api.get("/polykv/pools/p")).json()["savings"]["n_tokens"] == 40
            await ask(proxy, "p", [*BASE, 6])
            assert (await proxy.api.get("/polykv/pools/p")).json()["savings"]["n_tokens"] == 80
            await proxy.api.delete("/polykv/pools/q")
            shown = await page(proxy)
            assert [day["n_tokens"] for day in shown["days"]] == [43, 40]
            assert [(pool["pool_id"], pool["name"]) for pool in shown["days"][0]["pools"]] == [(1, "p"), (2, None)]
            assert (await page(proxy, "?days=1"))["n_tokens"] == 40
            assert (await proxy.api.get("/polykv/savings?days=0")).json()["error"]["param"] == "days"


async def test_old_days_are_folded_and_very_old_ones_go(tmp_path: Path) -> None:
    """Of old days the sum over all pools stays; in the end nothing."""
    clock = ManualClock()
    async with rig(tmp_path, clock=clock, state_dir=tmp_path / "state") as proxy:
        await proxy.pool(tokens=BASE, name="p")
        await proxy.pool(tokens=[7, 8, 9], name="q")
        await ask(proxy, "p", [*BASE, 5])
        await ask(proxy, "q", [7, 8, 9, 10])
        clock.now += 86400 * (savings.DAYS_BY_POOL + 1)
        for _ in range(2):
            await ask(proxy, "p", [*BASE, 6])
            clock.now += savings.WRITE_EVERY_S
            await proxy.runtime.sweep()
        shown = await page(proxy, "?days=400")
        assert [day["n_tokens"] for day in shown["days"]] == [43, 80]
        assert [(pool["pool_id"], pool["n_tokens"]) for pool in shown["days"][0]["pools"]] == [(None, 43)]
        clock.now += 86400 * savings.DAYS
        await ask(proxy, "p", [*BASE, 7])
        clock.now += savings.WRITE_EVERY_S
        await proxy.runtime.sweep()
        assert [day["n_tokens"] for day in (await page(proxy, "?days=400"))["days"]] == [40]


async def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written stays in memory, is shown, and is written later, once."""
    async with rig(tmp_path, state_dir=tmp_path / "state") as proxy:
        await proxy.pool(tokens=BASE, name="p")
        await ask(proxy, "p", [*BASE, 5])
        journal = proxy.runtime.hub.journal
        transact = journal.transact

        async def full(_job: object) -> None:
            raise JournalError("database or disk is full")

        monkeypatch.setattr(journal, "transact", full)
        proxy.clock.now += savings.WRITE_EVERY_S
        with pytest.raises(JournalError):
            await proxy.runtime.sweep()
        assert (await page(proxy))["n_tokens"] == 40
        monkeypatch.setattr(journal, "transact", transact)
        for _ in range(2):
            proxy.clock.now += savings.WRITE_EVERY_S
            await proxy.runtime.sweep()
        assert (await page(proxy))["n_tokens"] == 40
        today = datetime.datetime.fromtimestamp(proxy.clock.now, datetime.UTC).strftime("%Y-%m-%d")
        assert (await page(proxy))["days"][0]["day"] == today
