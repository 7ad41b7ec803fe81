"""Who has waited for too long on an engine that stands still.

Law: judges by what the engine shows of its work, never by bytes. Whoever waits has the whole limit, from when it began to wait or
from the last movement, whichever is later; as long as anything moves, nobody is overdue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Waiter = TypeVar("Waiter")
"""Any hashable thing."""


class Standstill(Generic[Waiter]):
    """The judge for one engine. `limit_s` in seconds, as all times here."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since: dict[Waiter, float] = {}
        self._work: object = None
        self._moved_at = float("-inf")

    def waits(self, waiting: Iterable[Waiter], now: float) -> bool:
        """These wait now, nobody else. False when nobody does: what was seen of the engine is then forgotten."""
        self._since = {waiter: self._since.get(waiter, now) for waiter in waiting}
        if not self._since:
            self._work = None
        return bool(self._since)

    def saw(self, work: object, now: float) -> None:
        """What the engine shows of its work; anything else than last time is movement, and so is the first sight."""
        if work != self._work:
            self._work = work
            self.moved(now)

    def moved(self, now: float) -> None:
        """The engine moved, or could not be watched until now."""
        self._moved_at = now

    def still_s(self, now: float) -> float | None:
        """For how long somebody has waited without movement; None while nobody waits."""
        return now - max(self._moved_at, min(self._since.values())) if self._since else None

    def overdue(self, now: float) -> list[Waiter]:
        """Those whose limit is over."""
        return [waiter for waiter, since in self._since.items() if now - max(since, self._moved_at) >= self.limit_s]
