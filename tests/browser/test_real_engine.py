"""The page in front of the real engine: what it shows while sessions run, and when the engine dies under them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, expect

from tests.browser.visit import opened
from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

PREFIX = list(range(1000, 1200))


class Agent(threading.Thread):
    """Asks turn after turn until told to stop, or until a turn fails."""

    def __init__(self, proxy: Product, name: str) -> None:
        super().__init__(daemon=True)
        self._proxy = proxy
        self._body = {"prompt": [*PREFIX, 11], "n_predict": 400, "pool_id": "clerk", "session_id": name, "ignore_eos": True}
        self.stopped = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            while not self.stopped.is_set():
                self._proxy.http.post("/completion", json=self._body).raise_for_status()


async def test_sessions_run_on_the_page_and_end_from_it(browser: Browser, engine_path: Path, tmp_path: Path) -> None:
    """Two sessions show their speed, one is ended; the engine is killed, and the page tells of it and of its return."""
    with product(engine_path, tiny_model("full"), tmp_path, args=("-c", 4096, "-np", 4)) as proxy:
        proxy.pool(tokens=PREFIX, name="clerk")
        agents = [Agent(proxy, name) for name in ("ann", "bob")]
        for agent in agents:
            agent.start()
        async with opened(browser, proxy.served.url, complaints=("503", "409")) as page:
            await expect(page.locator("#engine")).to_have_text("engine ready")
            for name in ("ann", "bob"):
                await expect(page.locator(".row.session.active", has_text=name).locator(".figures")).to_contain_text("tok/s")
            await expect(page.locator(".tile").first.locator(".value")).to_have_text(re.compile(r"^[1-9][\d,.]*$"))
            await expect(page.locator(".gauge")).to_have_attribute(
                "aria-label", re.compile("pools [1-9].*, private [1-9].*, free [1-9]")
            )
            agents[0].stopped.set()
            await page.locator(".row.session", has_text="ann").click()
            await page.get_by_role("button", name="End session").click()
            await page.get_by_role("dialog").get_by_role("button", name="End it").click()
            await expect(page.locator("#notice")).to_contain_text("Session ann has ended")
            os.kill(proxy.get("/polykv/health")["pid"], signal.SIGKILL)
            await expect(page.locator("#banner")).to_contain_text("The engine is")
            await expect(page.locator(".row.pool.lost")).to_be_visible()
            await expect(page.locator("#engine")).to_have_text("engine ready", timeout=60_000)
            await expect(page.locator("#banner")).to_be_hidden()
        for agent in agents:
            agent.stopped.set()
            agent.join(60)
