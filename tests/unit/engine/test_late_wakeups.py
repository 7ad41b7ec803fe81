"""Mirrors engine/late_wakeups.py."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvloop

from polykv_proxy.engine.late_wakeups import loop_errors


class Loud:
    """What `loop_errors` hands on."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.seen.append(context)


def test_a_wake_up_after_its_waiter_was_cancelled_is_dropped() -> None:
    """Two sockets are readable in one turn of uvloop; the first one's reader cancels what the second one's is to wake."""
    contexts: list[dict[str, Any]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: contexts.append(context))
        (first, tell_first), (second, tell_second) = socket.socketpair(), socket.socketpair()
        waiter: asyncio.Future[None] = loop.create_future()
        loop.add_reader(first, lambda: (first.recv(1), waiter.cancel()))
        loop.add_reader(second, waiter.set_result, None)
        waiter.add_done_callback(lambda _: loop.remove_reader(second))
        tell_first.send(b"x")
        tell_second.send(b"x")
        await asyncio.wait([waiter])
        await asyncio.sleep(0)
        loop.remove_reader(first)
        for end in (first, tell_first, second, tell_second):
            end.close()

    uvloop.run(main())
    assert len(contexts) == 1
    loud = Loud()
    loop_errors(loud, contexts[0])  # type: ignore[arg-type]
    assert loud.seen == []


def test_everything_else_is_handed_on() -> None:
    """Other exceptions, other handles and messages without either reach the loop's own handler."""
    loud = Loud()
    contexts: list[dict[str, Any]] = [
        {"message": "m"},
        {"message": "Exception in callback <built-in method set_result of ...>", "exception": ValueError("x")},
        {"message": "Exception in callback Cycle.start()", "exception": asyncio.InvalidStateError("x")},
    ]
    for context in contexts:
        loop_errors(loud, context)  # type: ignore[arg-type]
    assert loud.seen == contexts
