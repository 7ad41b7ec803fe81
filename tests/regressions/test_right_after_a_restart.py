"""Between "the engine answers" and "the proxy follows it" lies a moment; requests that name a pool wait for its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.integration.rig import rig

SYSTEM = "You are a careful agent with many tools and a long memory"
ASK = {"prompt": SYSTEM + " and a question", "n_predict": 2, "pool_id": 1}


async def test_an_attach_in_that_moment_shares_all_the_same(tmp_path: Path) -> None:
    """It is rebuilt from its tokens by that very request, which is not served without it."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt=SYSTEM)
        await proxy.server.crash()
        await proxy.until_unlinked()
        early = asyncio.ensure_future(proxy.call("/completion", ASK))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not early.done()
        await proxy.server.restart()
        await proxy.until_linked(proxy.engine.boot_id)
        reply = await early
        assert reply.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])


async def test_pools_are_lost_as_soon_as_the_process_is_known_to_be_gone(tmp_path: Path) -> None:
    """Nothing is shown resident until a connection breaks or a call fails."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        proxy.runtime.link.gone("the engine was killed by SIGKILL")
        shown = (await proxy.api.get("/polykv/pools/1")).json()
        assert (shown["residency"], shown["reason"]) == ("lost", "the engine was killed by SIGKILL")
