"""F070: shutdown hung while an event stream was open, or cut running work at once."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.proxy_process import Served
from tests.integration.rig import served


async def _last_lines(client: httpx.AsyncClient, path: str, opened: asyncio.Event) -> list[str]:
    async with client.stream("GET", path) as stream:
        assert stream.status_code == 200
        opened.set()
        return [line async for line in stream.aiter_lines() if line][-2:]


async def test_streams_end_at_once_and_running_work_goes_on(tmp_path: Path) -> None:
    """SIGTERM ends watchers with a last event while a request still runs; that one is finished, and the exit code is 0."""
    engine = FakeEngine()
    async with served(engine, tmp_path) as server:
        proxy = await asyncio.to_thread(Served.before, server.path, engine.key, tmp_path)
        with proxy:
            async with httpx.AsyncClient(base_url=proxy.url, trust_env=False, timeout=60) as client:
                engine.hold()
                work = asyncio.ensure_future(client.post("/completion", json={"prompt": "one two", "n_predict": 5}))
                while all(slot.state == "idle" for slot in engine.slots):
                    await asyncio.sleep(0.01)
                opened = [asyncio.Event() for _ in range(3)]
                paths = ("/polykv/tps", "/polykv/tps?interval_ms=60000", "/polykv/events")
                watching = [asyncio.ensure_future(_last_lines(client, *one)) for one in zip(paths, opened, strict=True)]
                await asyncio.wait_for(asyncio.gather(*(one.wait() for one in opened)), 30)
                proxy.process.send_signal(signal.SIGTERM)
                ends = await asyncio.wait_for(asyncio.gather(*watching), 20)
                assert [lines[0] for lines in ends] == ["event: closing"] * 3, ends
                assert not work.done()
                refused = await client.get("/polykv/tps")
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                engine.go()
                assert (await work).status_code == 200
            assert await asyncio.to_thread(proxy.process.wait, 60) == 0
