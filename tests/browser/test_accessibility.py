"""axe-core finds nothing to object to: names, roles, contrast, order, on every part of the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect

from tests.browser.scene import engine, fill
from tests.browser.visit import live, visit

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def objections(page: Page) -> list[str]:
    found = await Axe().run(page)
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found.response["violations"]]


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_every_part_of_the_page_can_be_used_by_everybody(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """The tree, the table, details, a question, and the page when the proxy does not answer."""
    async with live(tmp_path, engine(12, 6)) as proxy:
        await fill(proxy, 12, 6)
        async with visit(browser, proxy, color_scheme=scheme, complaints=("ERR_INTERNET_DISCONNECTED",)) as page:
            await expect(page.get_by_role("treeitem")).to_have_count(18)
            assert await objections(page) == []
            await page.get_by_role("button", name="Table").click()
            assert await objections(page) == []
            await page.locator(".row.pool").nth(1).click()
            assert await objections(page) == []
            await page.get_by_role("button", name="Pin").click()
            assert await objections(page) == []
            await page.keyboard.press("Escape")
            await page.context.set_offline(True)
            await expect(page.locator("#banner")).to_be_visible()
            assert await objections(page) == []
