"""How long a client may take to send a request that it has begun: the whole head, and each further piece of the body.

Law: costs nothing while requests come whole, in one read; else one timer a connection, which looks again when its time is not up.
Time in which we do not read does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Patience:
    """With one request at a time, of one connection. `too_slow` is called when the time is over."""

    def __init__(self, seconds: float, paused: Callable[[], bool], too_slow: Callable[[], None]) -> None:
        self._seconds = seconds
        self._paused = paused
        self._too_slow = too_slow
        self._loop = asyncio.get_running_loop()
        self._since = 0.0
        self._waits = False
        self._excused = False
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, *, in_head: bool) -> None:
        """Bytes came, and the request is not whole. A head has one deadline in all."""
        if not (self._waits and in_head):
            self._waits, self._since = True, self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._check)

    def excuse(self) -> None:
        """Reading is paused now; it may be resumed before the next look."""
        self._excused = True

    def over(self) -> None:
        """The request is whole."""
        self._waits = False

    def close(self) -> None:
        """There is no client any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        if not self._waits:
            return
        now = self._loop.time()
        if self._excused or self._paused():
            self._excused, self._since = False, now
        left = self._seconds - (now - self._since)
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._too_slow()
