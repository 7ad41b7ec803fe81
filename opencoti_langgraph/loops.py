"""Things that belong to one event loop: connections above all.

Law: each loop has its own, made at first use and closed when the loop ends: `asyncio.run` closes async generators, and each thing
is held by one. What a loop left behind that ended otherwise is dropped by the next use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One `make()` for each event loop, closed by `close`."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._kept: dict[asyncio.AbstractEventLoop, tuple[AsyncGenerator[T, None], T]] = {}

    async def get(self) -> T:
        """This loop's."""
        loop = asyncio.get_running_loop()
        if loop not in self._kept:
            for old in [old for old in self._kept if old.is_closed()]:
                del self._kept[old]
            holder = self._hold(loop)
            self._kept[loop] = (holder, await anext(holder))
        return self._kept[loop][1]

    async def close(self) -> None:
        """Close this loop's, if there is one."""
        held = self._kept.get(asyncio.get_running_loop())
        if held is not None:
            await held[0].aclose()

    async def _hold(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[T, None]:
        made = self._make()
        try:
            yield made
        finally:
            self._kept.pop(loop, None)
            await self._close(made)
