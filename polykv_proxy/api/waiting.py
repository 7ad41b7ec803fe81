"""Waiting for a pool on behalf of a client that may leave.

Law: a client that leaves stops waiting; whether the work stops with it is the flight's own rule.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request

from polykv_proxy.errors import ApiError, PolykvError, error_object
from polykv_proxy.runtime.answers import api_error
from polykv_proxy.runtime.flight import Flight
from polykv_proxy.runtime.orders import PoolFlight, Step

CLIENT_LEFT = 499
Result = TypeVar("Result")
Progress = TypeVar("Progress")


async def outcome(flight: Flight[Result, Progress]) -> Result:
    """The result of a flight. ApiError when it was stopped: its pool was released, or we are."""
    try:
        return await flight.wait()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ApiError("pool_releasing", "the pool was released meanwhile") from None


async def outcome_for(request: Request, flight: Flight[Result, Progress]) -> Result | None:
    """The result of a flight, or None when the client left first."""
    waiter = asyncio.ensure_future(outcome(flight))
    leaver = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({waiter, leaver}, return_when=asyncio.FIRST_COMPLETED)
        return await waiter if waiter.done() else None
    finally:
        waiter.cancel()
        leaver.cancel()
        await asyncio.wait({waiter, leaver})


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def first_step(flight: PoolFlight) -> Step | None:
    """The step in which the pool has its id, or None when the flight ends without (an existing pool, an error)."""
    async with aclosing(flight.steps()) as steps:
        async for step in steps:
            return step
    return None


async def as_events(flight: PoolFlight) -> AsyncGenerator[bytes, None]:
    """A flight as server-sent events: `progress` … then one `done` or `error`."""
    async with aclosing(flight.steps()) as steps:
        async for step in steps:
            facts: dict[str, object] = {"pool_id": step.pool_id}
            if step.progress is not None:
                facts |= step.progress.model_dump()
            yield _event("progress", json.dumps(facts))
    try:
        made = await outcome(flight)
    except PolykvError as error:
        answer = api_error(error)
        yield _event("error", json.dumps(error_object(answer.code, answer.message, param=answer.param, extra=answer.extra)))
        return
    yield _event("done", made.reply)


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()
