"""The page without a mouse."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser.scene import engine, fill
from tests.browser.visit import live, visit

pytestmark = pytest.mark.asyncio(loop_scope="session")

STOP = "(({id, role, textContent}) => id || role || textContent)(document.activeElement)"
FOCUSED = "document.activeElement.textContent"


async def press(page: Page, *keys: str) -> None:
    for key in keys:
        await page.keyboard.press(key)


async def test_arrows_walk_the_tree_and_fold_it(browser: Browser, tmp_path: Path) -> None:
    """One tab stop; down and up go by rows, right and left open, close and climb, Home and End go to the ends."""
    async with live(tmp_path, engine(8, 2)) as proxy:
        await fill(proxy, 8, 2)
        async with visit(browser, proxy) as page:
            rows = page.get_by_role("treeitem")
            await expect(rows).to_have_count(10)
            assert await page.locator(".row[tabindex='0']").count() == 1
            await page.locator(".row[tabindex='0']").focus()
            await press(page, "ArrowDown", "ArrowDown")
            assert (await page.evaluate(FOCUSED)).startswith("tools-0")
            await press(page, "ArrowLeft")
            assert (await page.evaluate(FOCUSED)).startswith("clerk-0")
            await press(page, "ArrowLeft")
            await expect(rows).to_have_count(1)
            await expect(rows.first).to_have_attribute("aria-expanded", "false")
            await press(page, "ArrowRight", "End")
            await expect(rows.last).to_be_focused()
            await press(page, "Home")
            assert (await page.evaluate(FOCUSED)).startswith("clerk-0")


async def test_a_pool_is_pinned_and_released_by_keys_alone(browser: Browser, tmp_path: Path) -> None:
    """Enter opens the details, the buttons ask, Escape leaves each, and the focus returns to where it was."""
    async with live(tmp_path, engine(4, 0)) as proxy:
        await fill(proxy, 4, 0)
        async with visit(browser, proxy) as page:
            await page.locator(".row[tabindex='0']").focus()
            await press(page, "ArrowDown", "Enter")
            await expect(page.locator("#detail-title")).to_be_focused()
            await page.get_by_role("button", name="Pin").focus()
            await press(page, "Enter")
            await expect(page.get_by_role("dialog")).to_contain_text("Pin tools-0?")
            await press(page, "Escape")
            await expect(page.get_by_role("dialog")).to_have_count(0)
            await expect(page.get_by_role("button", name="Pin")).to_be_focused()
            await press(page, "Enter")
            await page.get_by_label("Owner").fill("ann")
            await press(page, "Enter")
            await expect(page.get_by_role("treeitem", name="tools-0 pool, resident, pinned")).to_be_visible()
            assert (await proxy.api.get("/polykv/pools/tools-0")).json()["pin_owner"] == "ann"
            await press(page, "Escape")
            await expect(page.locator("#detail")).to_be_hidden()
            assert (await page.evaluate(FOCUSED)).startswith("tools-0")


async def test_the_focus_goes_on_when_its_row_goes(browser: Browser, tmp_path: Path) -> None:
    """A row that is released hands the focus to a neighbour; keys go on from there."""
    async with live(tmp_path, engine(3, 0)) as proxy:
        for name in ("one", "two", "three"):
            await proxy.pool(tokens=[ord(name[0]), 300, 301], name=name)
        async with visit(browser, proxy) as page:
            await page.locator(".row[tabindex='0']").focus()
            await press(page, "ArrowDown")
            await proxy.api.delete("/polykv/pools/two")
            await expect(page.get_by_role("treeitem")).to_have_count(2)
            assert (await page.evaluate(FOCUSED)).startswith("three")


async def test_every_stop_is_reached_and_can_be_seen(browser: Browser, tmp_path: Path) -> None:
    """Tab goes to the pools, the key, the table switch, the filter, the tree, the choice, the pause, the log; each is outlined."""
    async with live(tmp_path, engine(2, 1)) as proxy:
        await fill(proxy, 2, 1)
        async with visit(browser, proxy) as page:
            await expect(page.get_by_role("treeitem")).to_have_count(3)
            await expect(page.get_by_role("button", name="Table")).to_be_visible()
            seen = []
            for _ in range(8):
                await press(page, "Tab")
                seen.append(await page.evaluate(STOP))
                assert await page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
            assert seen == ["To the pools", "key", "Table", "filter", "treeitem", "log-choice", "log-hold", "log"]
