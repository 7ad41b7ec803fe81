"""Mirrors runtime/news.py."""

import asyncio
import json

import pytest

from polykv_proxy.runtime.news import News, Topic
from tests.integration.rig import ManualClock


def news(first_seq: int = 101, ring: int = 4) -> News:
    return News(ManualClock(), first_seq, ring)


def test_events_come_in_order_under_numbers_that_grow() -> None:
    """Numbers that something else took in between make no gap."""
    row = news()
    first = row.publish(Topic.POOL, "created", pool_id=1)
    assert row.number() == first.seq + 1
    second = row.publish(Topic.POOL, "resident", pool_id=1)
    assert row.after(100) == [first, second]
    assert row.after(first.seq) == [second]
    assert row.after(first.seq + 1) == [second]
    assert row.after(second.seq) == []
    assert json.loads(second.text) == {"seq": 103, "ts": ManualClock().wall(), "type": "resident", "pool_id": 1}


@pytest.mark.parametrize("seq", [0, 99, 1000])
def test_a_number_of_another_run_is_a_gap(seq: int) -> None:
    """Smaller than the first of this run, or larger than any that it gave out."""
    row = news()
    row.publish(Topic.ENGINE, "ready")
    assert row.after(seq) is None


def test_who_is_too_slow_is_told_so() -> None:
    """The ring keeps the last few; who has seen the last one that went has lost nothing."""
    row = news(ring=4)
    for n in range(7):
        row.publish(Topic.POOL, "created", n=n)
    assert row.after(102) is None
    assert [event.facts["n"] for event in row.after(103) or []] == [3, 4, 5, 6]


async def test_a_reader_wakes_for_an_event_and_for_the_end() -> None:
    """Waiting ends with the next event, or with the closing; who is behind does not wait at all."""
    row = news()
    waiting = asyncio.ensure_future(row.wait(row.seq, 60))
    await asyncio.sleep(0)
    row.publish(Topic.POOL, "created")
    await asyncio.wait_for(waiting, 20)
    await asyncio.wait_for(row.wait(100, 60), 20)
    resting = asyncio.ensure_future(row.rest(60))
    waiting = asyncio.ensure_future(row.wait(row.seq, 60))
    await asyncio.sleep(0)
    row.close()
    await asyncio.wait_for(asyncio.gather(waiting, resting), 20)
    assert row.closed
    await asyncio.wait_for(asyncio.gather(row.wait(row.seq, 60), row.rest(60)), 20)


async def test_patience_ends() -> None:
    """Nothing comes: waiting is over when its time is."""
    row = news()
    assert await asyncio.wait_for(row.wait(row.seq, 0.001), 20) is False
    await asyncio.wait_for(row.rest(0.001), 20)
