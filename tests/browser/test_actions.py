"""What the page does to pools and sessions, and what it says when the proxy refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser.visit import live, visit
from tests.integration.rig import Rig

pytestmark = pytest.mark.asyncio(loop_scope="session")

BASE = list(range(100, 140))


async def tree(proxy: Rig) -> None:
    """A pool, one below it, and a session on each."""
    await proxy.pool(tokens=BASE, name="root")
    (await proxy.api.post("/polykv/pools/root/fork", json={"tokens": [*BASE, 7, 8], "name": "leaf"})).raise_for_status()
    await proxy.call("/completion", {"prompt": [*BASE, 7, 8, 9], "pool_id": "leaf", "session_id": "a/b c?"})
    await proxy.settle()


async def do(page: Page, row: str, action: str, *, sure: bool = True) -> None:
    await page.locator(".row", has=page.get_by_text(row, exact=True)).click()
    await page.get_by_role("button", name=action, exact=True).click()
    await page.get_by_role("dialog").locator("footer button").nth(1 if sure else 0).click()


async def test_nothing_is_done_without_a_yes(browser: Browser, tmp_path: Path) -> None:
    """No leaves all as it was; a dangerous question begins on it."""
    async with live(tmp_path) as proxy:
        await tree(proxy)
        async with visit(browser, proxy) as page:
            await page.locator(".row.pool").last.click()
            await page.get_by_role("button", name="Evict").click()
            await expect(page.get_by_role("button", name="Cancel")).to_be_focused()
            await page.get_by_role("button", name="Cancel").click()
            await expect(page.get_by_role("dialog")).to_have_count(0)
            assert (await proxy.api.get("/polykv/pools/leaf")).json()["residency"] == "resident"


async def test_a_refusal_is_shown_and_the_question_stays(browser: Browser, tmp_path: Path) -> None:
    """The proxy's words stand in the dialog."""
    async with live(tmp_path) as proxy:
        await tree(proxy)
        async with visit(browser, proxy, complaints=("409",)) as page:
            await do(page, "leaf", "Evict")
            await expect(page.locator("dialog .trouble")).to_contain_text("session")
            await page.keyboard.press("Escape")
            await do(page, "root", "Release")
            await expect(page.locator("dialog .trouble")).to_contain_text("children")


async def test_a_session_ends_and_its_pool_is_evicted_flushed_and_released(browser: Browser, tmp_path: Path) -> None:
    """Each verb does what it says, with any session id, and the page says what came of it."""
    async with live(tmp_path) as proxy:
        await tree(proxy)
        async with visit(browser, proxy) as page:
            notice = page.locator("#notice")
            await do(page, "a/b c?", "End session")
            await expect(notice).to_contain_text("Session a/b c? has ended")
            await expect(page.locator(".row.session")).to_have_count(0)
            await expect(page.locator("#detail")).to_contain_text("This is gone.")
            await page.keyboard.press("Escape")
            await do(page, "leaf", "Evict")
            await expect(notice).to_have_text("leaf is evicted.")
            await page.keyboard.press("Escape")
            await do(page, "root", "Flush")
            await expect(notice).to_contain_text("1 pool evicted")
            await page.keyboard.press("Escape")
            await page.locator(".row", has=page.get_by_text("root", exact=True)).click()
            await page.get_by_role("button", name="Release").click()
            await page.get_by_label("and everything below it").check()
            await page.get_by_role("dialog").get_by_role("button", name="Release").click()
            await expect(page.get_by_role("treeitem")).to_have_count(0)


async def test_text_and_tokens_are_shown_when_asked_for(browser: Browser, tmp_path: Path) -> None:
    """Long ones are cut until all of it is asked for."""
    words = " ".join(f"word{n}" for n in range(3000))
    async with live(tmp_path) as proxy:
        pool = await proxy.pool(prompt=words)
        async with visit(browser, proxy) as page:
            await page.locator(".row.pool").click()
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            text, tokens = page.locator("details").nth(0), page.locator("details").nth(1)
            await text.locator("summary").click()
            await expect(text.locator("pre")).to_contain_text("word0 word1")
            assert not [url for url in asked if url.endswith("/tokens")]
            assert len(await text.locator("pre").inner_text()) == 20_000
            await text.get_by_role("button").click()
            await expect(text.locator("pre")).to_contain_text("word2999")
            await tokens.locator("summary").click()
            await expect(tokens.locator("pre")).to_contain_text("1 16 17")
            assert pool["prefix_len"] == 3001
