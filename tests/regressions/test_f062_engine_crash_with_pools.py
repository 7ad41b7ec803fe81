"""F062: the engine dies with running requests, waiting ones and pools, several times: nothing is pretended, nothing runs twice."""

import asyncio
from pathlib import Path

from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import rig

SYSTEM = "You are a careful agent with many tools and a long memory"


async def test_five_crashes_in_a_row(tmp_path: Path) -> None:
    """Three running, two queued, three pools: after each crash pools are lost, then rebuilt by use; no request is sent twice."""
    async with rig(tmp_path, FakeEngine(n_slots=3)) as proxy:
        names = ["a", "b", "c"]
        made = [await proxy.pool(prompt=f"{SYSTEM} for {name}", name=name) for name in names]
        n_sent = 0
        for _ in range(5):
            proxy.engine.hold()
            calls = []
            for n in range(5):
                body = {
                    "prompt": f"{SYSTEM} for {names[n % 3]} now",
                    "n_predict": 2,
                    "pool_id": names[n % 3],
                    "session_id": f"s{n}",
                }
                calls.append(asyncio.ensure_future(proxy.call("/completion", body)))
            n_sent += 5
            async with asyncio.timeout(20):
                while sum(slot.state != "idle" for slot in proxy.engine.slots) < 3:
                    await asyncio.sleep(0.005)
            await proxy.server.crash()
            await asyncio.gather(*calls, return_exceptions=True)
            await proxy.until_unlinked()
            shown = (await proxy.api.get("/polykv/pools")).json()["pools"]
            assert [pool["residency"] for pool in shown] == ["lost"] * 3
            assert (await proxy.api.get("/polykv/capacity")).status_code == 503
            await proxy.server.restart()
            await proxy.until_linked(proxy.engine.boot_id)
            for name, pool in zip(names, made, strict=True):
                reply = await proxy.call("/completion", {"prompt": f"{SYSTEM} for {name} again", "n_predict": 1, "pool_id": name})
                n_sent += 1
                assert reply.headers["x-pool-id"] == str(pool["pool_id"])
                assert reply.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])
            await proxy.settle()
        n_dry = len(names)
        assert proxy.server.calls.count(("POST", "/completion")) <= n_sent + n_dry
        assert (len(proxy.runtime.hub.ledger.books), len(proxy.engine.seqs)) == (0, 3)
