"""What moves on the page: speeds, lines, events, and tabs that nobody looks at."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser.scene import engine, fill
from tests.browser.visit import live, visit

pytestmark = pytest.mark.asyncio(loop_scope="session")

INK = """(chart) => { const canvas = chart.querySelector("canvas");
    return canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0); }"""
LOOK_AWAY = """(state) => { Object.defineProperty(document, "visibilityState", {value: state, configurable: true});
    document.dispatchEvent(new Event("visibilitychange")); }"""


async def test_running_sessions_have_their_speed_in_the_tree_the_charts_and_the_table(browser: Browser, tmp_path: Path) -> None:
    """Each running session has tokens per second beside its bar; both charts have lines; the table has all."""
    async with live(tmp_path, engine(4, 4)) as proxy:
        tasks = await fill(proxy, 4, 4, running=2)
        async with visit(browser, proxy) as page:
            await expect(page.locator(".row.session.active .figures", has_text="tok/s")).to_have_count(2)
            await expect(page.locator(".tile", has_text="Sessions active").locator(".value")).to_have_text("2")
            charts = page.locator(".chart")
            await expect(charts.first).to_have_attribute(
                "aria-label", re.compile(r"now: aggregate [\d,.]+, mean of the active [\d,.]+")
            )
            await expect(charts.last).to_have_attribute("aria-label", re.compile(r"now: 2 running, [\d,.]+ to [\d,.]+"))
            assert [await chart.evaluate(INK) for chart in await charts.all()] == [True, True]
            await page.get_by_role("button", name="Table").click()
            rows = page.get_by_role("table", name="Sessions").locator("tbody tr")
            await expect(rows).to_have_count(4)
            await expect(rows.filter(has_text="active")).to_have_count(2)
        for task in tasks:
            task.cancel()
        proxy.engine.go()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_events_are_told_newest_first_and_can_be_held(browser: Browser, tmp_path: Path) -> None:
    """Changes of pools and sessions come by themselves; requests when asked for; paused, the list stands still."""
    async with live(tmp_path) as proxy, visit(browser, proxy) as page:
        lines = page.locator("#log li span")
        await expect(page.locator("#link")).to_have_text("live")
        await proxy.pool(tokens=[5, 6, 7], name="clerk")
        await expect(lines.first).to_have_text("clerk (1) resident")
        await proxy.call("/completion", {"prompt": [5, 6, 7, 8], "pool_id": "clerk", "session_id": "ann"})
        await expect(lines.first).to_contain_text("ann")
        assert not [text for text in await lines.all_inner_texts() if "first token" in text]
        await page.get_by_label("Which events").select_option("Requests")
        await expect(lines.first).to_contain_text(re.compile(r"ann finished.*: 4 tokens"))
        await page.get_by_label("Which events").select_option("Changes")
        await page.get_by_role("button", name="Pause").click()
        shown = await lines.all_inner_texts()
        await proxy.api.post("/polykv/pools/clerk/pin", json={})
        await expect(page.locator(".row.pinned")).to_be_visible()
        assert await lines.all_inner_texts() == shown
        await page.get_by_role("button", name="Pause").click()
        await expect(lines.first).to_have_text("clerk (1) pinned")


async def test_what_pools_saved_stands_beside_what_they_did_not(browser: Browser, tmp_path: Path) -> None:
    """Tokens and requests of today, and the misses by reason; a pool's own in its details."""
    async with live(tmp_path) as proxy:
        await proxy.pool(tokens=[5, 6, 7], name="clerk")
        await proxy.call("/completion", {"prompt": [5, 6, 7, 8], "pool_id": "clerk"})
        await proxy.call("/completion", {"prompt": [9, 9, 9, 9, 9], "pool_id": "clerk"})
        await proxy.settle()
        async with visit(browser, proxy) as page:
            days = page.get_by_role("table", name="By day").locator("tbody tr")
            await expect(days).to_have_count(1)
            await expect(days).to_contain_text(re.compile(r"^\d{4}-\d\d-\d\d3.*1$"))
            await expect(page.get_by_role("table", name="Misses").locator("tbody")).to_contain_text("token mismatch5")
            await expect(page.locator(".tile", has_text="tokens saved").locator(".value")).to_have_text("3")
            await page.locator(".row.pool").click()
            await expect(page.locator("#detail dl")).to_contain_text("3 tokens, about")
            await expect(page.locator("#detail dl")).to_contain_text("token mismatch 1")


async def test_a_tab_that_nobody_looks_at_lets_go_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    """A minute out of sight it ends its streams and asks nothing; looked at, it knows what it missed."""
    async with live(tmp_path) as proxy, visit(browser, proxy) as page:
        await page.clock.install()
        await page.reload()
        await expect(page.locator("#link")).to_have_text("live")
        asked = await requests_of(page)
        await page.evaluate(LOOK_AWAY, "hidden")
        await page.clock.run_for(30_000)
        before = len(asked)
        assert before > 0
        await page.clock.run_for(31_000)
        asked.clear()
        await page.clock.run_for(60_000)
        assert asked == []
        await proxy.pool(tokens=[5, 6, 7], name="clerk")
        await page.evaluate(LOOK_AWAY, "visible")
        await page.clock.resume()
        await expect(page.get_by_role("treeitem", name="clerk pool, resident")).to_be_visible()
        await expect(page.locator("#log li span").first).to_have_text("clerk (1) resident")


async def requests_of(page: Page) -> list[str]:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    return asked
