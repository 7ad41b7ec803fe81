"""A real Chromium and pages in it. Without Chromium these tests are skipped, and the summary says why."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright, expect

expect.set_options(timeout=60_000)  # nothing is timed here: this only ends a test that hangs
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium that runs."""
    done = subprocess.run(
        [ROOT / "scripts/fetch_browser.sh"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"NO BROWSER, so nothing of the page was tested: {done.stderr.splitlines()[-1]}")
    return done.stdout.strip()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(chromium: str) -> AsyncIterator[Browser]:
    async with async_playwright() as driver:
        running = await driver.chromium.launch(executable_path=chromium)
        yield running
        await running.close()
