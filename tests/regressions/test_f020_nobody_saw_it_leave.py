"""F020: a client that leaves before the engine has read its request makes no event, and holds its pool no longer than that."""

from __future__ import annotations

from pathlib import Path

from polykv_proxy.ports import Plan
from tests.integration.rig import relay_request, rig


async def test_the_reference_is_back_within_three_seconds(tmp_path: Path) -> None:
    """The engine never hears of it; two seconds and one sweep later nothing runs on the pool, which can be released."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt="a shared beginning", name="p")
        plan = await proxy.gate.plan(relay_request(b'{"prompt": "x", "pool_id": "p"}'), lambda _: None)
        assert isinstance(plan, Plan)
        plan.done()
        await proxy.runtime.sweep()
        assert (await proxy.api.get("/polykv/pools/p")).json()["n_running"] == 1
        proxy.clock.now += 2
        await proxy.runtime.sweep()
        await proxy.settle()
        assert (await proxy.api.get("/polykv/capacity")).json()["n_requests"] == 0
        assert (await proxy.api.delete("/polykv/pools/p")).status_code == 200
