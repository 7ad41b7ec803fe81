"""How many sessions may start now, and waiting until one may.

Law: `startable` is pure and is the one place that reads a report. Whoever waits asks again at a cadence, never longer than told,
and gives up with GateClosedError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from opencoti_langgraph.client import PoolClient
from opencoti_langgraph.errors import GateClosedError, PoolNotFoundError, PoolUnavailableError, PoolUnsupportedError
from opencoti_langgraph.results import Capacity, PoolRef
from opencoti_langgraph.state import report_of

POLL_S = 0.5
LONGEST_POLL_S = 5.0
MAX_WAIT_S = 300.0


def startable(capacity: Capacity) -> int:
    """Sessions that may start on this report.

    1. A proxy without admission: as many as slots are free.
    2. A guaranteed start: one, whatever else is measured.
    3. Not admitted, or still settling from the last start: none.
    4. Under a floor while somebody is warming: none, their speed is not in the mean yet.
    5. Else the headroom that the report names, and no more than that.
    """
    if capacity.can_admit is None:
        free = capacity.slots_free
        return max(0, free if free is not None else (capacity.slots_total or 0) - (capacity.slots_busy or 0))
    if capacity.can_admit and capacity.guaranteed:
        return 1
    if not capacity.can_admit or capacity.settling:
        return 0
    if capacity.target_tps_per_session is not None and capacity.n_warming:
        return 0
    return 1 if capacity.headroom_sessions is None else max(0, capacity.headroom_sessions)


def retry_after_s(capacity: Capacity) -> float:
    """When to ask again, by what the report says."""
    told = [ms / 1000 for ms in (capacity.expected_wait_ms, capacity.settle_remaining_ms if capacity.settling else None) if ms]
    return min(max(min(told, default=POLL_S), 0.05), LONGEST_POLL_S)


@dataclass(frozen=True, slots=True)
class Ask:
    """Room for whom: sessions of `pool` (None: of no pool), each with so many tokens of its own."""

    pool: PoolRef | None = None
    expected_tokens: int | None = None
    min_sessions: int = 1


def look(client: PoolClient, ask: Ask) -> Capacity:
    """One look. Where a proxy has no reports by pool, or the pool is gone, the report for the whole counts."""
    if ask.pool is not None:
        with suppress(PoolUnsupportedError, PoolNotFoundError):
            return client.capacity(ask.pool, expected_tokens=ask.expected_tokens)
    return client.capacity(expected_tokens=ask.expected_tokens)


def seen(client: PoolClient, ask: Ask) -> Capacity:
    """As `look`; an engine that is away has no room, and may come back."""
    try:
        return look(client, ask)
    except PoolUnavailableError:
        return Capacity(can_admit=False, reason="the engine is away")


class Patience:
    """A bounded wait. `sleep`, `asleep` and `clock` are the world's."""

    def __init__(
        self,
        max_wait_s: float = MAX_WAIT_S,
        *,
        sleep: Callable[[float], None] = time.sleep,
        asleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_wait_s = max_wait_s
        self._sleep, self._asleep, self._clock = sleep, asleep, clock

    def until(self, client: PoolClient, ask: Ask) -> Capacity:
        """The first report with room. GateClosedError with the last one."""
        end = self._clock() + self.max_wait_s
        while startable(capacity := seen(client, ask)) < ask.min_sessions:
            self._sleep(self._pause(capacity, end))
        return capacity

    async def auntil(self, client: PoolClient, ask: Ask) -> Capacity:
        """As `until`, without holding up the event loop."""
        end = self._clock() + self.max_wait_s
        while startable(capacity := await asyncio.to_thread(seen, client, ask)) < ask.min_sessions:
            await self._asleep(self._pause(capacity, end))
        return capacity

    def _pause(self, capacity: Capacity, end: float) -> float:
        left = end - self._clock()
        if left <= 0:
            why = capacity.reason or "all slots are busy"
            raise GateClosedError(f"no room after {self.max_wait_s:g} s: {why}", report_of(capacity))
        return min(retry_after_s(capacity), left)
