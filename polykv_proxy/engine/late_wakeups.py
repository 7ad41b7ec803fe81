"""A known harmless error of the event loop, kept out of the log.

Law: drops exactly that one and hands on everything else.
"""

from __future__ import annotations

import asyncio
from typing import Any


def loop_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception handler for loops on which anyio (below httpx2) waits for unix sockets.

    anyio registers the bare `future.set_result` as reader and takes it off in a later turn. When uvloop sees the caller leave and
    the engine answer in one turn, the future is cancelled first and told its result then. Nobody waits for it any more.
    """
    invalid = isinstance(context.get("exception"), asyncio.InvalidStateError)
    if not (invalid and "set_result of" in context["message"]):
        loop.default_exception_handler(context)
