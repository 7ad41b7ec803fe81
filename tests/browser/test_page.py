"""The page in a real browser: what it shows, how it follows what happens, and that nothing of it runs that is not ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from polykv_proxy.api.context import Keys
from polykv_proxy.gpu_share import layout
from tests.browser.scene import engine, fill
from tests.browser.visit import live, opened, visit
from tests.fakes.fake_engine import FakeEngine
from tests.integration.gpu_share.peers import new_key, segment
from tests.integration.rig import relayed
from tests.lengths import length

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL = """[...document.querySelectorAll("button, .row, summary")]
    .filter((one) => one.checkVisibility() && one.getBoundingClientRect().height < 24).map((one) => one.outerHTML)"""
COUNT_WRITES = """() => {
    window.written = 0;
    const seen = new MutationObserver((all) => { written += all.length; });
    seen.observe(document.getElementById("tree"), {subtree: true, childList: true, attributes: true, characterData: true});
}"""


async def test_the_tree_shows_pools_and_their_sessions(browser: Browser, tmp_path: Path) -> None:
    """Each pool is a row on its level, its sessions below it, and bars lie where their tokens are."""
    async with live(tmp_path, engine(4, 1)) as proxy:
        await fill(proxy, 4, 1)
        async with visit(browser, proxy) as page:
            rows = page.get_by_role("treeitem")
            await expect(rows).to_have_count(5)
            names = [await row.locator(".name").inner_text() for row in await rows.all()]
            levels = [await row.get_attribute("aria-level") for row in await rows.all()]
            assert names == ["clerk-0", "agent-0", "tools-0", "review-0", "search-0"]
            assert levels == ["1", "2", "2", "2", "2"]
            above, below = [await page.locator(f".row:has-text('{name}') .own").bounding_box() for name in ("clerk-0", "tools-0")]
            assert above is not None
            assert below is not None
            assert abs(above["x"] + above["width"] - below["x"]) < 1.5
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_the_page_follows_what_happens(browser: Browser, tmp_path: Path) -> None:
    """A new pool, an eviction and a release show without a reload."""
    async with live(tmp_path) as proxy, visit(browser, proxy) as page:
        await expect(page.locator("#tree-empty")).to_have_text("There are no pools yet.")
        await proxy.pool(tokens=list(range(50, 90)), name="clerk")
        row = page.get_by_role("treeitem", name="clerk pool, resident")
        await expect(row).to_contain_text("40 tokens")
        await proxy.api.post("/polykv/pools/clerk/evict")
        await expect(page.get_by_role("treeitem", name="clerk pool, evicted")).to_contain_text("evicted")
        await proxy.api.delete("/polykv/pools/clerk")
        await expect(page.get_by_role("treeitem")).to_have_count(0)


async def test_what_callers_send_is_text_and_never_markup(browser: Browser, tmp_path: Path) -> None:
    """Session ids, prompts and owners full of markup are shown as they are, and make no element."""
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    async with live(tmp_path, keys=None) as proxy:
        await proxy.pool(prompt=f"hello {evil}", name="clerk")
        await proxy.api.post("/polykv/pools/clerk/pin", json={"owner": evil})
        await proxy.call("/completion", {"prompt": f"hello {evil} more", "pool_id": "clerk", "session_id": evil})
        await proxy.settle()
        async with visit(browser, proxy) as page:
            page.on("dialog", lambda _: pytest.fail("a script of a caller ran"))
            await expect(page.locator(".session .name")).to_have_text(evil)
            await page.locator(".row.pool").click()
            await page.get_by_text("Text", exact=True).click()
            await expect(page.locator("details pre").first).to_contain_text(evil)
            await expect(page.locator("dl")).to_contain_text(evil)
            await page.get_by_role("button", name=evil).click()
            await expect(page.locator("#detail-title")).to_have_text(evil)
            await page.get_by_role("button", name="End session").click()
            await expect(page.locator("dialog")).to_contain_text(evil)
            assert await page.locator("img, main script, aside script, dialog script").count() == 0


async def test_markup_out_of_strings_is_refused_by_the_browser(browser: Browser, tmp_path: Path) -> None:
    """Even a mistake of ours could not make markup of text: the policy forbids it."""
    async with live(tmp_path) as proxy, visit(browser, proxy, complaints=("Trusted", "Content Security Policy")) as page:
        assert "TrustedHTML" in await page.evaluate(
            "try { document.body.innerHTML = '<b>x</b>'; '' } catch (error) { String(error) }"
        )


async def test_the_key_is_asked_for_and_stays_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    """A wrong key is refused in words; the right one opens the page, and is neither in an address nor kept for later."""
    async with live(tmp_path, keys=Keys(frozenset({"secret"}))) as proxy:
        await proxy.api.post("/polykv/pools", json={"tokens": [5, 6, 7], "name": "clerk"}, headers={"x-api-key": "secret"})
        async with visit(browser, proxy, complaints=("401",)) as page:
            addresses: list[str] = []
            page.on("request", lambda request: addresses.append(request.url))
            await expect(page.get_by_role("alert").first).to_have_text("This proxy wants an API key.")
            await page.get_by_label("Key", exact=True).fill("wrong")
            await page.keyboard.press("Enter")
            await expect(page.locator("dialog .trouble")).to_have_text("The proxy does not take this key.")
            await page.get_by_label("Key", exact=True).fill("secret")
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("treeitem", name="clerk pool")).to_be_visible()
            await page.reload()
            await expect(page.get_by_role("treeitem", name="clerk pool")).to_be_visible()
            assert await page.evaluate("localStorage.length + document.cookie.length") == 0
            assert [address for address in addresses if "secret" in address] == []


async def test_without_an_engine_the_page_says_so_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    """The reason and the next try stand above what was known; when the engine is back the banner goes."""
    health: dict[str, object] = {"state": "ready"}
    async with live(tmp_path, health=health) as proxy:
        await proxy.pool(tokens=[5, 6, 7], name="clerk")
        async with visit(browser, proxy, complaints=("503",)) as page:
            await expect(page.locator("#engine")).to_have_text("engine ready")
            await proxy.server.crash()
            await proxy.until_unlinked()
            health |= {"state": "failed", "reason": "exit code 1", "retry_ts": time.time() + 9}
            await expect(page.locator("#banner")).to_contain_text("The engine is away: exit code 1. It is started again in")
            await expect(page.get_by_role("treeitem", name="clerk pool, lost")).to_be_visible()
            await proxy.server.restart()
            health |= {"state": "ready", "reason": None}
            await expect(page.locator("#banner")).to_be_hidden()


async def test_without_a_proxy_the_page_says_so_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    """What was known stays, marked as old, until something answers again."""
    async with live(tmp_path) as proxy:
        await proxy.pool(tokens=[5, 6, 7], name="clerk")
        async with visit(browser, proxy, complaints=("ERR_INTERNET_DISCONNECTED",)) as page:
            await expect(page.locator("#link")).to_have_text("live")
            await page.context.set_offline(True)
            await expect(page.locator("#banner")).to_contain_text("The proxy does not answer.")
            await expect(page.get_by_role("treeitem", name="clerk pool")).to_be_visible()
            await page.context.set_offline(False)
            await expect(page.locator("#link")).to_have_text("live")
            await expect(page.locator("#banner")).to_be_hidden()


async def test_an_engine_without_pools_leaves_a_page_with_its_reason(browser: Browser, tmp_path: Path) -> None:
    """The 501 of our routes is shown in words, with its remedy."""
    plain = FakeEngine()
    plain.has_verbs = False
    async with live(tmp_path, plain) as proxy, visit(browser, proxy, complaints=("501",)) as page:
        await expect(page.locator("#banner")).to_contain_text("run an engine that has them")


async def test_without_the_chart_library_there_is_a_table(browser: Browser, tmp_path: Path) -> None:
    """Where set-up could not fetch it the sessions are a table, sortable, and nothing is broken."""
    async with live(tmp_path, engine(2, 2)) as proxy, relayed(proxy) as (_, client):
        await fill(proxy, 2, 2)
        context = await browser.new_context()
        await context.route("**/vendor/**", lambda route: route.fulfill(status=404))
        page = await context.new_page()
        await page.goto(f"{client.base_url}/polykv/ui")
        table = page.get_by_role("table", name="Sessions")
        await expect(table.get_by_role("row")).to_have_count(3)
        await table.get_by_role("button", name="Session").click()
        await expect(table.locator("tbody td").first).to_have_text("agent-0")
        await table.get_by_role("button", name="Session").click()
        await expect(table.locator("tbody td").first).to_have_text("agent-1")
        await context.close()


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_a_phone_shows_all_of_it_in_its_width(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """Nothing is wider than the screen, details cover it, and everything to press is large enough for a finger."""
    async with live(tmp_path, engine(12, 8)) as proxy:
        await fill(proxy, 12, 8)
        async with visit(browser, proxy, color_scheme=scheme, viewport={"width": 390, "height": 844}, has_touch=True) as page:
            await page.locator(".row.pool").first.tap()
            await expect(page.locator("#detail-title")).to_have_text("clerk-0")
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert await page.evaluate(SMALL) == []


async def test_many_pools_and_sessions_cost_what_changed(browser: Browser, tmp_path: Path) -> None:
    """With all rows there, one changed pool writes a handful of nodes: rows are kept by key and nothing is drawn anew."""
    n = length(80, 200)
    async with live(tmp_path, engine(n, n)) as proxy:
        await fill(proxy, n, n)
        async with visit(browser, proxy) as page:
            await expect(page.locator(".row")).to_have_count(2 * n)
            await page.evaluate(COUNT_WRITES)
            await proxy.api.post("/polykv/pools/9/pin", json={})
            await expect(page.locator(".row.pinned .name")).to_have_text("clerk-1")
            assert 0 < await page.evaluate("written") < 20
            await page.get_by_label("Filter pools and sessions").fill("clerk-1")
            await expect(page.locator(".row.pool .name").first).to_have_text("clerk-1")


async def test_two_tabs_of_one_proxy_do_not_disturb_each_other(browser: Browser, tmp_path: Path) -> None:
    """What is done in one shows in the other."""
    async with live(tmp_path) as proxy, relayed(proxy) as (_, client):
        url = str(client.base_url)
        await proxy.pool(tokens=[5, 6, 7], name="clerk")
        async with opened(browser, url) as one, opened(browser, url) as other:
            await one.get_by_role("treeitem", name="clerk pool").click()
            await one.get_by_role("button", name="Release").click()
            await one.get_by_role("dialog").get_by_role("button", name="Release").click()
            await expect(other.get_by_role("treeitem")).to_have_count(0)


async def test_engines_that_share_the_device_are_a_panel(browser: Browser, tmp_path: Path) -> None:
    """Who is there, ours marked, and gone when the device is shared no longer."""
    with new_key() as key:
        now = int(time.time() * 1e6)
        entries = [layout.Entry(slot, 100 + slot, 5, 77, 2.0 - slot, True, now, 0, f"model-{slot}") for slot in (0, 1)]
        segment(key).write_bytes(layout.build(entries))
        shared = FakeEngine()
        shared.gpu_share = {"enabled": True, "gpu_key": key, "slot": 1, "weight": 1.0}
        async with live(tmp_path, shared) as proxy, beating(key, entries), visit(browser, proxy) as page:
            panel = page.locator("#peers")
            await expect(panel.locator("tbody tr")).to_have_count(2)
            assert await panel.locator("tbody tr").first.inner_text() == "model-1 (this one)\t1\t33 %\t0 %\tactive"
            segment(key).unlink()
            await expect(panel).to_be_hidden()


@asynccontextmanager
async def beating(key: str, entries: list[layout.Entry]) -> AsyncIterator[None]:
    """Their hearts, for as long as the segment is there."""

    async def beat() -> None:
        with segment(key).open("r+b", buffering=0) as file:
            while True:
                now = int(time.time() * 1e6)
                file.seek(0)
                file.write(layout.build([replace(entry, heartbeat_us=now) for entry in entries]))
                await asyncio.sleep(0.2)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
