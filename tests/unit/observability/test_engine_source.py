"""Asking the engine for its page."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from polykv_proxy.engine.stock_wire import MetricsReply
from polykv_proxy.errors import EngineRefusedError, EngineUnavailableError
from polykv_proxy.observability import engine_source
from polykv_proxy.observability.engine_source import EngineSource, Failure


class Desk:
    """An engine that answers as told, a clock and a door."""

    def __init__(self) -> None:
        self.now = 100.0
        self.life: int | None = 1
        self.n_asked = 0
        self.answer: Callable[[], Awaitable[MetricsReply]] = self.page

    async def page(self) -> MetricsReply:
        return MetricsReply(f"llamacpp:x {self.n_asked}\n".encode())

    async def fetch(self) -> MetricsReply:
        self.n_asked += 1
        return await self.answer()

    def source(self) -> EngineSource:
        return EngineSource(self.fetch, lambda: self.life, lambda: self.now)


async def test_questions_do_not_overlap_and_nobody_waits_longer_than_he_says() -> None:
    """While an answer is outstanding no second question is asked, and the page of before stays."""
    desk, door = Desk(), asyncio.Event()
    source = desk.source()
    source.refresh()
    await source.refreshed(10)

    async def slow() -> MetricsReply:
        await door.wait()
        return MetricsReply(b"llamacpp:x 9\n")

    desk.answer = slow
    for _ in range(3):
        source.refresh()
        await source.refreshed(0)
    assert desk.n_asked == 2
    assert source.page is not None
    assert source.page.value("llamacpp:x") == 1
    desk.now += 3
    assert source.age_s == 3
    door.set()
    await source.refreshed(10)
    assert source.page.value("llamacpp:x") == 9
    assert source.age_s == 0


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (EngineRefusedError(501, "not_supported_error", "no such page"), Failure.REFUSED),
        (EngineUnavailableError("gone"), Failure.UNREACHABLE),
        (None, Failure.MALFORMED),
    ],
)
async def test_a_page_that_fails_is_missing_and_counted(error: Exception | None, failure: Failure) -> None:
    """The part is gone at once, one count for each failure, and comes back with the next good page."""
    desk = Desk()
    source = desk.source()
    source.refresh()
    await source.refreshed(10)

    async def bad() -> MetricsReply:
        if error is not None:
            raise error
        return MetricsReply(b'"quoted"')

    desk.answer = bad
    for n in (1, 2):
        source.refresh()
        await source.refreshed(10)
        assert source.page is None
        assert source.age_s is None
        assert source.failures == {failure: n}
    desk.answer = desk.page
    source.refresh()
    await source.refreshed(10)
    assert source.page is not None


async def test_no_answer_at_all_is_a_failure_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that hangs is given up; the next question is asked then."""
    monkeypatch.setattr(engine_source, "PATIENCE_S", 0.01)
    desk = Desk()

    async def hang() -> MetricsReply:
        await asyncio.Event().wait()
        raise AssertionError

    desk.answer = hang
    source = desk.source()
    source.refresh()
    await source.refreshed(10)
    assert source.failures == {Failure.TIMEOUT: 1}


async def test_a_page_does_not_grow_old_for_ever() -> None:
    """Of an engine that is busy whenever somebody asks the last page is shown for a while, then none; a new one counts again."""
    desk = Desk()
    source = desk.source()
    source.refresh()
    await source.refreshed(10)
    desk.now += engine_source.OLDEST_S
    assert source.page is not None
    desk.now += 1
    assert (source.page, source.age_s, source.failures.total()) == (None, None, 0)
    source.refresh()
    await source.refreshed(10)
    assert (source.age_s, desk.n_asked) == (0, 2)


async def test_an_engine_that_is_not_ready_is_not_asked() -> None:
    """Its last page does not count, also not in its next life, and nothing is a failure."""
    desk = Desk()
    source = desk.source()
    source.refresh()
    await source.refreshed(10)
    desk.life = None
    source.refresh()
    await source.refreshed(10)
    assert (source.page, desk.n_asked, source.failures.total()) == (None, 1, 0)
    desk.life = 2
    assert source.page is None
    source.refresh()
    await source.refreshed(10)
    assert source.page is not None
    await source.stop()
