"""A visit to the page of a rig, as an operator makes it.

Law: what the browser complains of in its console fails the visit, unless the test expects it; so does a request to another host.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from playwright.async_api import Browser, Page

from polykv_proxy.runtime.runtime import SystemClock
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, relayed, rig


def live(folder: Path, engine: FakeEngine | None = None, **options: object) -> AbstractAsyncContextManager[Rig]:
    """A rig on real time: what is streamed at a cadence needs time to pass."""
    return rig(folder, engine, clock=SystemClock(), **options)


@asynccontextmanager
async def visit(browser: Browser, proxy: Rig, *, complaints: tuple[str, ...] = (), **context: object) -> AsyncIterator[Page]:
    """The page, loaded. `complaints`: parts of console errors that belong to the test; `context`: options of its context."""
    async with relayed(proxy) as (_, client), opened(browser, str(client.base_url), complaints=complaints, **context) as page:
        yield page


@asynccontextmanager
async def opened(browser: Browser, url: str, *, complaints: tuple[str, ...] = (), **context: object) -> AsyncIterator[Page]:
    """The page of a proxy that listens already."""
    opened_context = await browser.new_context(**context)
    page = await opened_context.new_page()
    heard: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda message: heard.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    try:
        await page.goto(f"{url}/polykv/ui")
        yield page
    finally:
        await opened_context.close()
    assert [text for text in heard if not any(part in text for part in complaints)] == []
    assert hosts == {urlsplit(url).netloc}
