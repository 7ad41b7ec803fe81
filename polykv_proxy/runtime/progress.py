"""The no-progress limit: requests end with an error when the engine that owes them an answer stands still.

Law: the engine is asked only while somebody waits for it, one question at a time. What counts is its published state; of an engine
without our verbs, the counters of its public slots; where it has neither, and while it sleeps or wakes up, any answer counts as
movement. An engine that does not answer stands still. Nothing here stops or starts an engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from enum import StrEnum
from typing import Any

from polykv_proxy.core.standstill import Standstill
from polykv_proxy.errors import ApiError, EngineAbilityError, EngineError, EngineRefusedError
from polykv_proxy.ports import Waiting
from polykv_proxy.runtime.hub import Hub

log = logging.getLogger("polykv.progress")

CADENCE_S = 1.0
RETRY_AFTER_S = 5.0
_NO_VERBS = frozenset({401, 403, 404, 501})


class Evidence(StrEnum):
    """By what the engine is judged. `unknown`: not asked yet; `none`: by whether it answers."""

    UNKNOWN = "unknown"
    STATE = "state"
    SLOTS = "slots"
    NONE = "none"


class ProgressWatch:
    """Watches one engine. `waiting` gives those who wait now; `doubt` is awaited with the reason whenever somebody was ended."""

    def __init__(
        self,
        hub: Hub,
        limit_s: float,
        waiting: Callable[[], Iterable[Waiting]],
        doubt: Callable[[str], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._hub = hub
        self._judge: Standstill[Waiting] = Standstill(limit_s)
        self._waiting = waiting
        self._doubt = doubt
        self._cadence_s = min(CADENCE_S, limit_s / 4)
        self._looking: asyncio.Task[None] | None = None
        self._ticked_at: float | None = None
        self.evidence = Evidence.UNKNOWN
        self.why_none: str | None = None
        self.n_ended = 0
        self.last_ts: float | None = None
        self.last_reason: str | None = None

    async def run(self) -> None:
        """Watch for ever."""
        try:
            while True:
                await asyncio.sleep(self._cadence_s)
                self.tick()
        finally:
            self._stop_looking()

    def tick(self) -> None:
        """One look at those who wait, and at the engine where somebody does."""
        now = self._hub.clock.monotonic()
        if self._ticked_at is not None and now - self._ticked_at > self._cadence_s + CADENCE_S:
            self._judge.moved(now)  # it is we who stood still
        self._ticked_at = now
        if not self._judge.waits(self._waiting(), now):
            self._stop_looking()
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self.look())
        overdue = self._judge.overdue(now)
        if overdue:
            self._end(overdue)
            self._judge.waits(self._waiting(), now)

    async def look(self) -> None:
        """Ask the engine once. Never raises."""
        try:
            await self._ask()
        except EngineError as error:
            log.info("no word from the engine about its progress: %s", error)

    def facts(self) -> Mapping[str, object]:
        """For the health page."""
        return {
            "limit_s": self._judge.limit_s,
            "evidence": self.evidence.value,
            "reason": self.why_none,
            "still_s": self._judge.still_s(self._hub.clock.monotonic()),
            "n_ended": self.n_ended,
            "last_ts": self.last_ts,
            "last_reason": self.last_reason,
        }

    async def _ask(self) -> None:
        """1. The published state, unless this engine has none. 2. The public slots. 3. Nothing to judge by."""
        hub = self._hub
        if hub.absent is None:
            try:
                state = await hub.client.state()
            except EngineRefusedError as refused:
                if refused.status not in _NO_VERBS:
                    raise
            else:
                self.evidence, self.why_none = Evidence.STATE, None
                self._saw(state.work() if state.phase == "ready" else None)
                return
        try:
            slots = await hub.client.slots(patience_s=self._judge.limit_s)
        except EngineRefusedError as refused:
            self._set_unable(f"its /slots answers {refused.status} {refused.message}")
            return
        except EngineAbilityError as error:
            self._set_unable(str(error))
            return
        if any(slot.is_processing and slot.work() is None for slot in slots):
            self._set_unable("its /slots has no counters of a slot that works")
            return
        self.evidence, self.why_none = Evidence.SLOTS, None
        self._saw(tuple(slot.work() for slot in slots))

    def _saw(self, work: object) -> None:
        """`None`: it answers, and that is all there is to judge by."""
        now = self._hub.clock.monotonic()
        if work is None:
            self._judge.moved(now)
        else:
            self._judge.saw(work, now)

    def _set_unable(self, why: str) -> None:
        if self.evidence is not Evidence.NONE:
            log.warning("the no-progress limit sees only whether this engine answers: it has no pool protocol, and %s", why)
        self.evidence, self.why_none = Evidence.NONE, why
        self._saw(None)

    def _end(self, overdue: list[Waiting]) -> None:
        reason = f"the engine has shown no progress for {self._judge.limit_s:g} s (--no-progress-s)"
        log.error("%s: %d requests are ended", reason, len(overdue))
        self.n_ended += len(overdue)
        self.last_ts, self.last_reason = self._hub.clock.wall(), reason
        message = f"{reason[0].upper()}{reason[1:]}: the request was ended."
        for waiter in overdue:
            waiter.cut(ApiError("engine_no_progress", message, retry_after_s=RETRY_AFTER_S))
        if self._doubt is not None:
            self._hub.spawn(self._doubt(reason))

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
