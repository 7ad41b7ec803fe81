"""The page: how old it may be, and for whom it is made."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric

from polykv_proxy.engine.stock_wire import MetricsReply
from polykv_proxy.observability import page as pages
from polykv_proxy.observability.described import Described, Kind
from polykv_proxy.observability.engine_source import EngineSource
from polykv_proxy.observability.exposition import Form
from polykv_proxy.observability.page import FRESH_S, RECENT_S, MetricsPage

MADE = Described("polykv_made", Kind.GAUGE, "How often the page was made.")


class Rig:
    """A page over an engine that answers when it is let, and a clock."""

    def __init__(self) -> None:
        self.now = 50.0
        self.n_made = 0
        self.n_asked = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.source = EngineSource(self.fetch, lambda: 1, lambda: self.now)
        self.page = MetricsPage(self.source, self.collect, lambda: self.now)

    async def fetch(self) -> MetricsReply:
        self.n_asked += 1
        await self.answers.wait()
        return MetricsReply(b"llamacpp:asked %d\n" % self.n_asked, "1700000000")

    def collect(self) -> Iterator[Metric]:
        self.n_made += 1
        yield MADE.one(self.n_made)

    async def text(self) -> str:
        return (await self.page.read(Form.TEXT)).body.decode()


async def test_the_first_answer_has_both_parts() -> None:
    """An engine that answers at once is in the page that is asked for first, and so is the word since when it counts."""
    rig = Rig()
    made = await rig.page.read(Form.TEXT)
    assert b"llamacpp:asked 1\n" in made.body
    assert b"polykv_made 1.0\n" in made.body
    assert made.started == "1700000000"
    assert gzip.decompress(made.compressed) == made.body


async def test_an_engine_that_does_not_answer_holds_nobody_up() -> None:
    """Ours is there at once and fresh; the engine's part comes when it comes."""
    rig = Rig()
    rig.answers.clear()
    for n in (1, 2, 3):
        text = await rig.text()
        assert "llamacpp" not in text
        assert f"polykv_made {n}.0" in text
        rig.now += FRESH_S + 0.01
    rig.answers.set()
    await rig.source.refreshed(10)
    assert "llamacpp:asked 1" in await rig.text()


async def test_who_asks_seldom_is_told_what_the_engine_says_now() -> None:
    """What was read a moment ago, when the engine became ready say, lacks what was done since; who asks often may get that."""
    rig = Rig()
    rig.source.refresh()
    await rig.source.refreshed(10)
    assert "llamacpp:asked 2\n" in await rig.text()
    rig.now += FRESH_S / 2
    assert "llamacpp:asked 2\n" in await rig.text()
    rig.now += RECENT_S + 0.01
    await rig.page._make(Form.TEXT, gently=True)  # ahead, for whoever asked before
    rig.now += FRESH_S / 2
    text = await rig.text()
    assert ("llamacpp:asked 3\n" in text, "polykv_made 3.0\n" in text) == (True, True)


async def test_an_engine_that_is_busy_does_not_hold_up_who_asks_seldom() -> None:
    """He gets what it said before."""
    rig = Rig()
    await rig.text()
    rig.answers.clear()
    rig.now += RECENT_S + 0.01
    assert "llamacpp:asked 1\n" in await rig.text()
    assert rig.n_asked == 2
    rig.answers.set()


async def test_answers_are_at_most_as_old_as_promised() -> None:
    """Within that age the same page serves everyone; beyond it a new one is made."""
    rig = Rig()
    await rig.text()
    rig.now += FRESH_S / 2
    assert "polykv_made 1.0" in await rig.text()
    rig.now += FRESH_S
    assert "polykv_made 2.0" in await rig.text()


async def test_a_page_that_is_slow_to_make_is_made_less_often() -> None:
    """One that took a second of the loop serves for five, so that there is time for other work."""
    rig = Rig()
    collect = rig.collect

    def slowly() -> Iterator[Metric]:
        rig.now += 1
        yield from collect()

    rig.page._collect = slowly
    assert "polykv_made 1.0" in await rig.text()
    rig.now += 3.5
    assert "polykv_made 1.0" in await rig.text()
    rig.now += 1
    assert "polykv_made 2.0" in await rig.text()


async def test_pages_are_made_ahead_while_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks often is given a page that was made before he asked; when nobody asks, nothing is made."""
    rig = Rig()
    ticks: asyncio.Queue[None] = asyncio.Queue()
    idle = asyncio.Event()

    async def sleep(seconds: float) -> None:
        if seconds:
            idle.set()
            await ticks.get()

    monkeypatch.setattr(pages.asyncio, "sleep", sleep)
    task = asyncio.ensure_future(rig.page.run())

    async def tick() -> None:
        idle.clear()
        ticks.put_nowait(None)
        await idle.wait()

    await rig.text()
    await idle.wait()
    await tick()
    rig.now += FRESH_S / 2
    made = rig.n_made
    assert f"polykv_made {made}.0" in await rig.text()
    assert (made, rig.n_made) == (2, 2)
    await tick()
    assert rig.n_made == 3
    rig.now += RECENT_S + 1
    idle.clear()
    ticks.put_nowait(None)
    while rig.page._asked.is_set():
        await asyncio.wait([asyncio.ensure_future(ticks.join())], timeout=0)
    assert rig.n_made == 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_page_being_made_slowly_does_not_replace_a_newer_one() -> None:
    """What was begun earlier is older, whenever it is done."""
    rig = Rig()
    slow = asyncio.ensure_future(rig.page._make(Form.TEXT, gently=True))
    await asyncio.sleep(0)
    rig.now += 1
    newer = await rig.text()
    await slow
    assert await rig.text() == newer
