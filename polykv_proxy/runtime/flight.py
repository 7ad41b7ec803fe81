"""One piece of work that several may wait for.

Law: the work runs once; a waiter that leaves does not stop it unless it was the last one and nobody asked to keep it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")
Step = TypeVar("Step")
Item = TypeVar("Item")


class Flight(Generic[Result, Step]):
    """A running task with waiters and a stream of progress steps.

    `keep`: go on when the last waiter leaves. `kept_open`: somebody was told to come back for the outcome. `unasked`: begun because
    there was time for it; it goes on without waiters.
    """

    def __init__(
        self,
        work: Callable[[Flight[Result, Step]], Coroutine[Any, Any, Result]],
        *,
        keep: bool = False,
        unasked: bool = False,
    ) -> None:
        self.keep = keep or unasked
        self._unasked = unasked
        self.kept_open = False
        self.latest: Step | None = None
        self._waiters = 0
        self._moved = asyncio.Event()
        self._task = asyncio.ensure_future(work(self))
        self._task.add_done_callback(self._ended)

    @property
    def done(self) -> bool:
        """Is the work over?"""
        return self._task.done()

    @property
    def unasked(self) -> bool:
        """Has nobody asked for this work up to now?"""
        return self._unasked and not self._waiters

    @property
    def ending(self) -> bool:
        """Is the work over, or being stopped?"""
        return self._task.done() or self._task.cancelling() > 0

    def cancel(self) -> None:
        """Stop the work for everyone."""
        self._task.cancel()

    async def ended(self) -> None:
        """Wait for the end, whatever it is."""
        await asyncio.wait([self._task])

    def when_over(self, call: Callable[[], None]) -> None:
        """Call this when the work is over, for whatever reason."""
        self._task.add_done_callback(lambda _: call())

    def report(self, step: Step) -> None:
        """Called by the work: how far it is."""
        self.latest = step
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def wait(self) -> Result:
        """The result, or the error of the work. Cancelled waiters leave; CancelledError also when the work itself was stopped."""
        return await self._as_waiter(asyncio.shield(self._task))

    async def steps(self) -> AsyncGenerator[Step, None]:
        """The steps from now to the end, the latest only where the reader is slow."""
        self._waiters += 1
        seen: Step | None = None
        try:
            while True:
                moved = self._moved
                if self.latest is not None and self.latest is not seen:
                    seen = self.latest
                    yield seen
                    continue
                if self._task.done():
                    return
                await moved.wait()
        finally:
            self._leave()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count as a waiter while inside."""
        self._waiters += 1
        try:
            yield
        finally:
            self._leave()

    def holding(self, items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        """The same items; counts as a waiter from now on until they end or are closed."""
        self._waiters += 1

        async def passed() -> AsyncGenerator[Item, None]:
            try:
                async with aclosing(items):
                    async for item in items:
                        yield item
            finally:
                self._leave()

        return passed()

    async def _as_waiter(self, result: Awaitable[Result]) -> Result:
        self._waiters += 1
        try:
            return await result
        finally:
            self._leave()

    def _leave(self) -> None:
        self._waiters -= 1
        if not self._waiters and not self.keep and not self._task.done():
            self._task.cancel()

    def _ended(self, task: asyncio.Future[Result]) -> None:
        self._moved.set()
        if not task.cancelled():
            task.exception()
