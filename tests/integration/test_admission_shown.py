"""What is shown of admission: policies with what may start by them, the listing of pools, health and metrics of one moment."""

from __future__ import annotations

from pathlib import Path

from tests.integration.rig import rig
from tests.integration.test_admission import FLOOR, POOL, at_rest, policy, settled, start, until, waiting


async def test_every_policy_is_listed_with_what_may_start_by_it(tmp_path: Path) -> None:
    """One answer has arm and room of each policy, and who waits by it, heirs included; the listing has each pool's floor."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL, name="base")
        await proxy.api.post("/polykv/pools/1/fork", json={"tokens": [*POOL, 1], "name": "heir"})
        await policy(proxy, **FLOOR, on_saturation="queue", queue_timeout_ms=600_000)
        await proxy.api.post("/polykv/admission", json={"target_tps_per_session": 2})
        first = await settled(proxy, "a")
        second, third = start(proxy, "b", 3), start(proxy, "c", 3, pool_id=2)
        await until(proxy, lambda: waiting(proxy) == 2)
        shown = (await proxy.api.get("/polykv/admission")).json()
        default, base = shown["policies"]
        assert (default["pool_id"], default["floor_tps"], default["mode"], default["n_queued"]) == (None, 2, "advisory", 0)
        assert (base["pool_id"], base["name"], base["floor_tps"], base["n_queued"]) == (1, "base", 5000, 2)
        assert (base["can_admit"], base["arm"], base["headroom_sessions"], base["n_pool_sessions"]) == (False, "floor", 0, 1)
        assert [one["position"] for one in shown["queue"]] == [1, 1]
        rows = (await proxy.api.get("/polykv/pools")).json()["pools"]
        assert [row["policy"]["inherited_from"] for row in rows] == [None, 1]
        assert {row["policy"]["target_tps_per_session"] for row in rows} == {5000}
        health = (await proxy.api.get("/polykv/health")).json()["admission"]
        assert (health["n_policies"], health["n_enforced"], health["n_running"], health["n_queued"]) == (2, 1, 1, 2)
        for task in (second, third):
            task.cancel()
        await until(proxy, lambda: waiting(proxy) == 0)
        proxy.engine.go()
        await first
        await at_rest(proxy)


async def test_without_policies_there_is_nothing_to_show(tmp_path: Path) -> None:
    """Null in the listing, an empty list, zeros on the health page; a policy shows, and the listing is a new one."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=POOL)
        before = await proxy.api.get("/polykv/pools")
        assert before.json()["pools"][0]["policy"] is None
        assert (await proxy.api.get("/polykv/admission")).json()["policies"] == []
        assert (await proxy.api.get("/polykv/health")).json()["admission"]["n_policies"] == 0
        await policy(proxy, target_tps_per_session=5)
        after = await proxy.api.get("/polykv/pools", headers={"if-none-match": before.headers["etag"]})
        assert (after.status_code, after.json()["pools"][0]["policy"]["mode"]) == (200, "advisory")
