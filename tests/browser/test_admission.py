"""Admission on the page: floors, who waits, and what is decided, as it happens."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, expect

from tests.browser.scene import engine, fill
from tests.browser.visit import live, visit
from tests.integration.rig import Rig

pytestmark = pytest.mark.asyncio(loop_scope="session")

FLOOR = {"target_tps_per_session": 900_000, "mode": "enforced", "on_saturation": "queue", "queue_timeout_ms": 3_600_000}
"""So fast is nobody, and nobody is refused while a test looks."""


def ask(proxy: Rig, session: str) -> asyncio.Task:
    """A new session on the first pool."""
    body = {"prompt": [*range(100, 112), 7], "pool_id": 1, "session_id": session, "n_predict": 2}
    return asyncio.create_task(proxy.call("/completion", body))


async def end(proxy: Rig, *tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    proxy.engine.go()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_floors_the_queue_and_decisions_are_live(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """The floor is a line of the chart and a row; who waits has place and reason; who leaves is a decision. Readable by all."""
    async with live(tmp_path, engine(1, 2)) as proxy:
        running = await fill(proxy, 1, 2, running=2)
        (await proxy.api.post("/polykv/pools/1/admission", json=FLOOR)).raise_for_status()
        async with visit(browser, proxy, color_scheme=scheme) as page:
            panel = page.locator("#admission")
            policies = panel.get_by_role("table", name="Policies").locator("tbody tr")
            await expect(policies).to_have_count(1)
            await expect(policies).to_contain_text(re.compile(r"clerk-0900,000 tok/senforced: queue\d"))
            await expect(page.locator(".chart").first).to_have_attribute("aria-label", re.compile(r"floor of clerk-0 900,000$"))
            waiting = [ask(proxy, name) for name in ("ann", "ben")]
            queue = panel.get_by_role("table", name="Waiting").locator("tbody tr")
            await expect(queue).to_have_count(2)
            await expect(queue.first).to_contain_text(re.compile(r"^1ann, pool 1.*projected mean tps below floor"))
            await expect(panel.locator(".readout")).to_contain_text("2 wait")
            await expect(page.locator("#log li.decision").first).to_contain_text(re.compile(r"ben held, pool 1: projected mean"))
            assert [one["id"] for one in (await Axe().run(page)).response["violations"]] == []
            waiting[0].cancel()
            decisions = panel.get_by_role("table", name="Last decisions").locator("tbody tr")
            await expect(decisions.first).to_contain_text(re.compile(r"ann.*cancelled"))
            await expect(queue).to_have_count(1)
            await expect(queue).to_contain_text(re.compile(r"^1ben"))
            await page.reload()
            await expect(decisions.filter(has_text="ann")).to_have_count(1)
            await page.locator(".row.pool").click()
            await expect(page.locator("#detail dl")).to_contain_text("floor 900,000 tok/s, enforced: queue")
        await end(proxy, *running, *waiting)


async def test_without_a_policy_there_is_no_panel_until_there_is_one(browser: Browser, tmp_path: Path) -> None:
    """Set, it shows; removed, the line ends and the row goes. What callers send is text."""
    evil = "<img src=x onerror=alert(1)>"
    async with live(tmp_path, engine(1, 1)) as proxy:
        await fill(proxy, 1, 0)
        async with visit(browser, proxy) as page:
            await expect(page.get_by_role("treeitem")).to_have_count(1)
            await expect(page.locator("#admission")).to_be_hidden()
            await proxy.api.post("/polykv/pools/1/admission", json={"target_tps_per_session": 2.5})
            row = page.get_by_role("table", name="Policies").locator("tbody tr")
            await expect(row).to_contain_text("2.5 tok/sadvisory: would reject")
            await ask(proxy, evil)
            await expect(page.get_by_role("table", name="Last decisions")).to_contain_text(evil)
            assert await page.locator("img").count() == 0
            await proxy.api.delete("/polykv/pools/1/admission")
            await expect(row).to_have_count(0)
            await expect(page.locator("#admission")).to_be_visible()
