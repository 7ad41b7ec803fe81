"""Mirrors runtime/flight.py."""

import asyncio

import pytest

from polykv_proxy.runtime.flight import Flight


class Work:
    """Work that ends when told."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.cancelled = False

    async def __call__(self, flight: Flight[str, int]) -> str:
        try:
            for step in range(3):
                flight.report(step)
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return "there"


async def test_all_waiters_get_the_one_result() -> None:
    """The work runs once, however many wait."""
    work = Work()
    flight = Flight(work)
    waiters = [asyncio.ensure_future(flight.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    work.end.set()
    assert await asyncio.gather(*waiters) == ["there"] * 3
    assert flight.done


@pytest.mark.parametrize("keep", [False, True])
async def test_the_last_waiter_that_leaves_stops_it_unless_it_is_kept(keep: bool) -> None:
    """One of two may leave; when the last one does, only kept work goes on."""
    work = Work()
    flight = Flight(work, keep=keep)
    waiters = [asyncio.ensure_future(flight.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    for n, waiter in enumerate(waiters):
        assert not work.cancelled
        waiter.cancel()
        await asyncio.wait([waiter])
        await asyncio.sleep(0)
        assert work.cancelled is (n == 1 and not keep)
    flight.cancel()
    await flight.ended()


async def test_work_that_is_being_stopped_is_ending() -> None:
    """Before it is done: who comes now must not join it."""
    flight = Flight(Work())
    await asyncio.sleep(0)
    assert not flight.ending
    flight.cancel()
    assert (flight.ending, flight.done) == (True, False)
    await flight.ended()
    assert (flight.ending, flight.done) == (True, True)


async def test_an_error_reaches_every_waiter() -> None:
    """Waiters see the error of the work, and nobody complains when none is there."""

    async def fails(_flight: Flight[str, int]) -> str:
        raise LookupError("no")

    flight = Flight(fails, keep=True)
    await flight.ended()
    with pytest.raises(LookupError):
        await flight.wait()


async def test_steps_end_with_the_work() -> None:
    """A reader sees the latest step and stops when the work is over."""
    work = Work()
    flight = Flight(work)
    work.end.set()
    assert [step async for step in flight.steps()][-1] == 2


async def test_holding_counts_as_waiting() -> None:
    """While a reply is being streamed the work is held, and let go when the stream is closed."""
    work = Work()
    flight = Flight(work)

    async def items():
        yield "a"
        await asyncio.Event().wait()

    with flight.held():
        held = flight.holding(items())
    assert await anext(held) == "a"
    await asyncio.sleep(0)
    assert not work.cancelled
    await held.aclose()
    await flight.ended()
    assert work.cancelled
