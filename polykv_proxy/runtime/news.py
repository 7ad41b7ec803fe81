"""What happened, in order, for whoever wants to know: one row of events under one number, kept for a while.

Law: publishing never waits and never fails; nothing is kept for a reader but its place, so that a slow one loses events and is told
so. The numbers are shared with everything else that is shown: of two things with a number the larger is the newer.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from polykv_proxy.ports import Clock

RING = 4096


class Topic(StrEnum):
    """What an event is about."""

    POOL = "pool"
    SESSION = "session"
    REQUEST = "request"
    ENGINE = "engine"
    DECISION = "decision"
    POLICY = "policy"
    PEER = "peer"


@dataclass(frozen=True)
class Event:
    """One thing that happened. `facts` are JSON-ready."""

    seq: int
    ts: float
    topic: Topic
    type: str
    facts: Mapping[str, object]

    @cached_property
    def text(self) -> str:
        """As JSON; rendered once for all readers."""
        return json.dumps({"seq": self.seq, "ts": self.ts, "type": self.type, **self.facts}, separators=(",", ":"))


class News:
    """The last events. `first_seq` is the first number that this run gives out; smaller ones are of an earlier run."""

    def __init__(self, clock: Clock, first_seq: int = 1, ring: int = RING) -> None:
        self.seq = first_seq - 1
        self._clock = clock
        self._ring: deque[Event] = deque(maxlen=ring)
        self.n_gaps = 0
        self._gone = self.seq
        self._last = self.seq
        self._woken = asyncio.Event()
        self._closing = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Is the proxy being stopped?"""
        return self._closing.is_set()

    def number(self) -> int:
        """The next number, for something that is shown."""
        self.seq += 1
        return self.seq

    def publish(self, topic: Topic, kind: str, **facts: object) -> Event:
        """Something happened now."""
        event = Event(self.number(), self._clock.wall(), topic, kind, facts)
        if len(self._ring) == self._ring.maxlen:
            self._gone = self._ring[0].seq
        self._ring.append(event)
        self._last = event.seq
        self._wake()
        return event

    def after(self, seq: int) -> list[Event] | None:
        """Events with a larger number, in order; None when some are gone, or when this run never gave out that number."""
        if not self._gone <= seq <= self.seq:
            return None
        found = []
        for event in reversed(self._ring):
            if event.seq <= seq:
                break
            found.append(event)
        return found[::-1]

    def skip(self) -> int:
        """The newest number, for a reader that has missed events."""
        self.n_gaps += 1
        return self.seq

    async def wait(self, seq: int, seconds: float) -> bool:
        """Until there is an event after this number, or this is closed; False when the time is over first."""
        if self._last > seq or self.closed:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return False
        return True

    async def rest(self, seconds: float) -> None:
        """Until this is closed, or the time is over; events do not end it."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        """Readers end now; what comes later is still kept."""
        self._closing.set()
        self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()
