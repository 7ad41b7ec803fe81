"""Mirrors api/streams.py: what readers are told, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fastapi.sse import KEEPALIVE_COMMENT

from polykv_proxy.api import streams
from polykv_proxy.api.streams import Speeds, happenings
from polykv_proxy.runtime.news import News, Topic
from polykv_proxy.runtime.rows import StateView, Whole
from tests.integration.rig import ManualClock

ALL = frozenset(Topic)
WHOLE = Whole(**dict.fromkeys(Whole.__slots__, 0))  # type: ignore[arg-type]


def news(ring: int = 4) -> News:
    return News(ManualClock(), 101, ring)


async def told(chunks: AsyncIterator[bytes]) -> str:
    return (await asyncio.wait_for(anext(chunks), 20)).decode()


class Looks:
    """Views on demand, each newer than the one before."""

    def __init__(self) -> None:
        self.seq = 0

    def __call__(self) -> StateView:
        self.seq += 1
        return StateView(self.seq, 1.0, True, "b", WHOLE, (), ())


async def test_events_are_told_as_they_come_and_by_topic() -> None:
    """Each with its number as id; other topics are skipped, and the place moves on over them."""
    row = news()
    pools = happenings(row, row.seq, frozenset({Topic.POOL}))
    row.publish(Topic.SESSION, "opened")
    row.publish(Topic.POOL, "created", pool_id=1)
    text = await told(pools)
    assert text.startswith("event: pool\ndata: {")
    assert text.endswith("}\nid: 102\n\n")
    assert '"type":"created","pool_id":1' in text
    waiting = asyncio.ensure_future(told(pools))
    await asyncio.sleep(0)
    row.publish(Topic.POOL, "released", pool_id=1)
    assert '"type":"released"' in await waiting


async def test_a_slow_reader_is_told_to_look_again_and_gets_what_is_new() -> None:
    """More happened than is kept: one resync with the present number, then what comes after it."""
    row = news(ring=4)
    slow = happenings(row, row.seq, ALL)
    row.publish(Topic.POOL, "created", n=0)
    assert '"n":0' in await told(slow)
    for n in range(1, 10):
        row.publish(Topic.POOL, "created", n=n)
    assert await told(slow) == 'event: resync\ndata: {"seq":110}\nid: 110\n\n'
    row.publish(Topic.POOL, "created", n=10)
    text = await told(slow)
    assert text.count("event:") == 1
    assert '"n":10' in text


async def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection on which nothing happens is not taken for dead."""
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.001)
    assert await told(happenings(news(), 100, ALL)) == KEEPALIVE_COMMENT.decode()
    speeds = Speeds(news(), Looks()).chunks(3600, None, running=False)
    assert "event: tps" in await told(speeds)
    assert await told(speeds) == KEEPALIVE_COMMENT.decode()


async def test_streams_end_with_a_last_event() -> None:
    """What had happened is told first; then the end."""
    row = news()
    events = happenings(row, row.seq, ALL)
    speeds = Speeds(row, Looks()).chunks(3600, None, running=False)
    assert "event: tps" in await told(speeds)
    ending = asyncio.ensure_future(told(speeds))
    await asyncio.sleep(0)
    row.publish(Topic.ENGINE, "draining")
    row.close()
    assert "draining" in await told(events)
    for last in (await told(events), await ending):
        assert last.startswith("event: closing\n")
    for stream in (events, speeds):
        assert [chunk async for chunk in stream] == []


async def test_speeds_that_were_seen_are_not_told_again() -> None:
    """A reader that comes back with the number of this very view waits for the next."""
    looks = Looks()
    seen = Speeds(news(), looks).chunks(0.001, 1, running=False)
    assert (await told(seen)).endswith("\nid: 2\n\n")
    older = Speeds(news(), Looks()).chunks(0.001, 0, running=False)
    assert (await told(older)).endswith("\nid: 1\n\n")


async def test_a_timer_that_is_early_does_not_tell_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moment of the cadence is told once, though the clock is not quite there yet."""
    row, now = news(), asyncio.get_running_loop().time
    rest = row.rest
    monkeypatch.setattr(row, "rest", lambda seconds: rest(seconds - 0.002))
    speeds = Speeds(row, Looks()).chunks(0.02, None, running=False)
    await told(speeds)
    began = now()
    for _ in range(8):
        await told(speeds)
    assert now() - began >= 7 * 0.02 - 0.003


def test_one_view_is_one_text_for_all() -> None:
    """The same bytes for every reader, made once; another for those who want running ones only."""
    speeds, view = Speeds(news(), Looks()), Looks()()
    assert speeds.event(view, running=False) is speeds.event(view, running=False)
    assert speeds.event(view, running=True) is not speeds.event(view, running=False)
