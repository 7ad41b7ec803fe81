"""Where the engine's own page comes from: asked for in the background, one question at a time.

Law: nobody waits for it longer than he says. A page lives until a newer one is there, the engine fails to give one, the engine is
not ready any more, or it is too old.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import StrEnum

from polykv_proxy.engine.stock_wire import MetricsReply
from polykv_proxy.errors import EngineError, EngineRefusedError
from polykv_proxy.observability.engine_page import BadPageError, EnginePage, read_page

log = logging.getLogger("polykv.metrics")

PATIENCE_S = 5.0
OLDEST_S = 300.0
"""Prometheus takes a sample for gone after this time, too."""


class Failure(StrEnum):
    """Why there was no page."""

    REFUSED = "refused"
    """The engine answered an error: the page is switched off, or wants another key."""
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    """What came would be refused by strict readers."""


class EngineSource:
    """One engine's page. `fetch` asks for it; `life` numbers the lives of the engine, None while it is not ready; `now` is a steady
    clock in seconds.
    """

    def __init__(
        self,
        fetch: Callable[[], Awaitable[MetricsReply]],
        life: Callable[[], int | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures: Counter[Failure] = Counter()
        self.started: str | None = None
        self._fetch, self._life, self._now = fetch, life, now
        self._page: EnginePage | None = None
        self._of: int | None = None
        self._read_at = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._told: Failure | None = None

    @property
    def page(self) -> EnginePage | None:
        """The last page of this life, if it is not older than `OLDEST_S`."""
        fresh = self._now() - self._read_at <= OLDEST_S
        return self._page if fresh and self._of is not None and self._of == self._life() else None

    @property
    def age_s(self) -> float | None:
        """Seconds since the page was read; None without one."""
        return self._now() - self._read_at if self.page is not None else None

    def refresh(self) -> None:
        """Ask for a new page, unless that is being done."""
        life = self._life()
        if life is not None and (self._asking is None or self._asking.done()):
            self._asking = asyncio.get_running_loop().create_task(self._ask(life))

    async def refreshed(self, patience_s: float) -> None:
        """Wait for the answer, not longer than this."""
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=patience_s)

    async def stop(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self, life: int) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                reply = await self._fetch()
            self._page, self._of, self._read_at, self._told = read_page(reply.body), life, self._now(), None
            self.started = reply.started
        except TimeoutError:
            self._failed(Failure.TIMEOUT, f"no answer for {PATIENCE_S:g} s")
        except EngineRefusedError as error:
            self._failed(Failure.REFUSED, f"{error.status} {error.message}")
        except EngineError as error:
            self._failed(Failure.UNREACHABLE, str(error))
        except BadPageError as error:
            self._failed(Failure.MALFORMED, str(error))

    def _failed(self, failure: Failure, why: str) -> None:
        self._page = None
        self.failures[failure] += 1
        if failure is not self._told:
            log.warning("/metrics goes without the engine's own page: %s", why)
        self._told = failure
