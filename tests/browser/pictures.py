"""The README's pictures: six agents at work on a tree of pools, as the page and the terminal show them.

Law: nothing is posed but the questions; figures are those of the machine on which this runs.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from pathlib import Path

import httpx
from playwright.async_api import Browser, Page, async_playwright

from polykv_proxy.ui.top.app import TopApp
from polykv_proxy.ui.top.remote import Remote
from tests.conftest import ROOT
from tests.fakes.proxy_process import Served
from tests.models import smollm2

ARGS = ("-c", "8192", "-np", "8", "-t", "1", "--jinja")
LOOKS_S = 60
SIZE = {"width": 1440, "height": 900}
RULES = """You are an agent of the harbour office. You answer in plain words, you name the rule that you follow, you never promise a
date that is not in the timetable, and you say so when you do not know. Ships report two hours before they arrive. Berths are given
in the order of reports; ferries go before freighters, and freighters before yachts. Dues are by length and by night."""
TASKS = {
    "ferries": "The task: write to the captains of all ferries what changes in the winter timetable.",
    "freight": "The task: make a plan for the three freighters that arrive tonight, with two berths and one crane.",
    "crane": "Detail of the task: the crane lifts twelve tons, and its driver rests from one to two.",
    "yachts": "The task: answer the questions of yacht owners about dues and berths.",
}
PARENTS = {"ferries": "harbour", "freight": "harbour", "crane": "freight", "yachts": "harbour"}
AGENTS = {"planner": "freight", "loader": "crane", "driver": "crane", "writer": "ferries", "checker": "ferries", "desk": "yachts"}


def messages(pool: str) -> list[dict[str, str]]:
    """The conversation that a pool is the start of."""
    if pool == "harbour":
        return [{"role": "system", "content": RULES}]
    return [*messages(PARENTS[pool]), {"role": "user", "content": TASKS[pool]}, {"role": "assistant", "content": "Understood."}]


async def make_pools(client: httpx.AsyncClient) -> None:
    """The tree, with one pin and one pool that was let go."""
    (await client.post("/polykv/pools", json={"name": "harbour", "messages": messages("harbour")})).raise_for_status()
    for name, parent in PARENTS.items():
        body = {"name": name, "messages": messages(name)}
        (await client.post(f"/polykv/pools/{parent}/fork", json=body)).raise_for_status()
    (await client.post("/polykv/pools/harbour/pin", json={"owner": "ann", "lease": 3600})).raise_for_status()
    floor = {"target_tps_per_session": 6, "mode": "enforced", "on_saturation": "queue", "guarantee_min_sessions": 6}
    (await client.post("/polykv/pools/harbour/admission", json=floor)).raise_for_status()
    old = {"name": "summer", "messages": [{"role": "system", "content": f"{RULES} This is the summer timetable."}]}
    (await client.post("/polykv/pools", json=old)).raise_for_status()
    (await client.post("/polykv/pools/summer/evict")).raise_for_status()


async def work(client: httpx.AsyncClient, agent: str, pool: str) -> None:
    """Turn after turn, until told to stop."""
    talk = messages(pool)
    for turn in range(1000):
        question = [*talk, {"role": "user", "content": f"I am the {agent}. What should be done as step {turn + 1}, and why?"}]
        body = {"pool_id": pool, "session_id": agent, "messages": question, "max_tokens": 60 + 10 * (len(agent) + turn) % 70}
        (await client.post("/v1/chat/completions", json=body)).raise_for_status()


async def open_page(browser: Browser, url: str) -> Page:
    """The page, which watches from now on."""
    page = await browser.new_page(viewport=SIZE)
    await page.goto(f"{url}/polykv/ui")
    await page.locator("#link.live").wait_for()
    return page


async def page_pictures(page: Page, folder: Path) -> None:
    """What it shows, dark and light."""
    for scheme in ("dark", "light"):
        await page.emulate_media(color_scheme=scheme)
        await page.wait_for_function("document.querySelectorAll('.chart canvas').length == 2")
        await page.screenshot(path=folder / f"page-{scheme}.png")


async def terminal_picture(browser: Browser, url: str, folder: Path) -> None:
    """`polykv-proxy top` after some seconds."""
    remote = Remote(url)
    app = TopApp(remote.look, url)
    async with app.run_test(size=(132, 26)):
        await asyncio.sleep(LOOKS_S)
        drawn = app.export_screenshot(title="polykv-proxy top")
    await remote.close()
    page = await browser.new_page(viewport=SIZE)
    own_fonts = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    await page.set_content(f"<body style='margin:0;background:#0000'>{own_fonts}</body>")
    await page.locator("svg").first.screenshot(path=folder / "terminal.png", omit_background=True)


async def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as state, Served(ROOT / "llamafile", smollm2(), Path(state), args=ARGS) as proxy:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=600, trust_env=False) as client, async_playwright() as driver:
            browser = await driver.chromium.launch(executable_path=os.environ["POLYKV_CHROMIUM"])
            page = await open_page(browser, proxy.url)
            await make_pools(client)
            agents = [asyncio.create_task(work(client, agent, pool)) for agent, pool in AGENTS.items()]
            await terminal_picture(browser, proxy.url, folder)
            await page_pictures(page, folder)
            for task in agents:
                task.cancel()
            await asyncio.gather(*agents, return_exceptions=True)
            await browser.close()
        proxy.stop()
    print("\n".join(str(path) for path in sorted(folder.glob("*.png"))))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
