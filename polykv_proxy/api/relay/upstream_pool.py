"""The engine's door: where it is, whether it is open, and the connections kept to it.

Law: a kept connection is offered only while the engine surely keeps it too (idle for less than `idle_s`, and seen open by a
poll). A request that must not run twice gets one only if it was used a moment ago (`fresh_idle_s`), else a new one: so no
request is ever sent into a connection that the engine is about to close for idleness.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections import deque
from collections.abc import Callable

from polykv_proxy.api.relay.known import Known, KnownReply
from polykv_proxy.api.relay.upstream import Upstream
from polykv_proxy.errors import ApiError
from polykv_proxy.ports import EngineAddress

_CONNECT_RETRY_S = 0.002
_CONNECT_PATIENCE_S = 30.0
"""An engine that has no time to take connections is busy, not gone."""


class UpstreamPool:
    """Connections to one engine. Shut until `open` is called; `refusal` says why it is shut."""

    def __init__(
        self,
        *,
        idle_s: float = 2.0,
        fresh_idle_s: float = 0.5,
        max_idle: int = 512,
        max_open: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refusal: ApiError | None = ApiError("engine_starting", "The engine has not been started yet.", retry_after_s=2)
        self.n_open = 0
        self.known: Known[KnownReply] = Known()
        self._address = EngineAddress()
        self._idle_s = idle_s
        self._fresh_idle_s = fresh_idle_s
        self._max_idle = max_idle
        self._max_open = max_open
        self._clock = clock
        self._idle: deque[Upstream] = deque()
        self._waiters: deque[asyncio.Future[Upstream | None]] = deque()
        self._reaper: asyncio.TimerHandle | None = None
        self._row = asyncio.Lock()

    def open(self, address: EngineAddress) -> None:
        """The engine listens at `address`. Connections to an earlier boot are dropped."""
        self.drop_idle()
        self._address = address
        self.refusal = None

    def shut(self, refusal: ApiError) -> None:
        """No engine for now; new requests are answered with `refusal`. Running exchanges end by themselves."""
        self.refusal = refusal
        self.drop_idle()

    def drop_idle(self) -> None:
        """Close all connections that nobody uses."""
        while self._idle:
            self._idle.pop().abort()
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None

    @property
    def n_idle(self) -> int:
        """Connections kept for later."""
        return len(self._idle)

    def take(self, *, repeatable: bool) -> Upstream | None:
        """The most recently used connection that is safe for the request, or None. `repeatable`: the request may be sent again."""
        limit = self._idle_s if repeatable else self._fresh_idle_s
        now = self._clock()
        while self._idle:
            if now - self._idle[-1].idle_since >= limit:
                return None
            upstream = self._idle.pop()
            if upstream.looks_open():
                return upstream
            upstream.abort()
        return None

    async def connect(self) -> Upstream:
        """A new connection, or one just used. Waits in line while the limit is reached. Raises OSError where nobody listens."""
        handed = await self._enter()
        if handed is not None:
            return handed
        try:
            upstream = await self._connect()
        except BaseException:
            self._leave()
            raise
        upstream.counted = True
        return upstream

    def release(self, upstream: Upstream) -> None:
        """Give back a connection whose reply is complete and may be followed by another."""
        upstream.resume()
        if self._waiters and self.refusal is None and self._hand_over(upstream):
            return
        if self.refusal is not None or len(self._idle) >= self._max_idle:
            upstream.abort()
            return
        upstream.idle_since = self._clock()
        self._idle.append(upstream)
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().call_later(self._idle_s, self._reap)

    def forget(self, upstream: Upstream) -> None:
        """A connection is gone."""
        with contextlib.suppress(ValueError):
            self._idle.remove(upstream)
        if upstream.counted:
            upstream.counted = False
            self._leave()

    async def _enter(self) -> Upstream | None:
        while self._max_open is not None and self.n_open >= self._max_open:
            if self._idle:
                self._idle.popleft().abort()
            waiter: asyncio.Future[Upstream | None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                handed = await waiter
            except asyncio.CancelledError:
                self._pass_on(waiter)
                raise
            if handed is not None and handed.looks_open():
                return handed
        self.n_open += 1
        return None

    def _pass_on(self, waiter: asyncio.Future[Upstream | None]) -> None:
        """What a cancelled waiter was given goes to the next."""
        with contextlib.suppress(ValueError):
            self._waiters.remove(waiter)
        if waiter.done() and not waiter.cancelled():
            handed = waiter.result()
            if handed is None:
                self._wake()
            else:
                self.release(handed)

    def _leave(self) -> None:
        self.n_open -= 1
        self._wake()

    def _wake(self) -> None:
        self._hand_over(None)

    def _hand_over(self, upstream: Upstream | None) -> bool:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(upstream)
                return True
        return False

    async def _connect(self) -> Upstream:
        """A unix socket whose accept queue is full refuses at once and makes nobody wait: so all wait here, in a row."""
        loop = asyncio.get_running_loop()
        address, end = self._address, loop.time() + _CONNECT_PATIENCE_S
        if (made := await self._try(address)) is not None:
            return made
        async with self._row:
            while (made := await self._try(address)) is None:
                if loop.time() > end:
                    raise OSError(errno.EAGAIN, "the engine does not accept connections")
                await asyncio.sleep(_CONNECT_RETRY_S)
        return made

    async def _try(self, address: EngineAddress) -> Upstream | None:
        """A connection, or None where the accept queue is full."""
        loop, upstream = asyncio.get_running_loop(), Upstream(self)
        try:
            if address.uds is not None:
                await loop.create_unix_connection(lambda: upstream, address.uds)
            else:
                await loop.create_connection(lambda: upstream, address.host, address.port)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            return None
        return upstream

    def _reap(self) -> None:
        self._reaper = None
        now = self._clock()
        while self._idle and now - self._idle[0].idle_since >= self._idle_s:
            self._idle.popleft().abort()
        if self._idle:
            wait = self._idle_s - (now - self._idle[0].idle_since)
            self._reaper = asyncio.get_running_loop().call_later(wait, self._reap)
