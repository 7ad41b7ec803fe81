"""What pools spared, and what they did not: tokens and time of prompts, by pool, day and outcome.

Law: pure; amounts are only added. Time that was spared is an estimate, by the speed at which prompts were computed last; time that
was not is as measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from polykv_proxy.core.books import Book, Brought
from polykv_proxy.core.events import SlotEvent
from polykv_proxy.core.pace import Pace

HIT = "hit"
REBUILT = "rebuilt"
MEASURABLE = 16
"""Shorter prompts tell of the fixed cost of a step, not of their tokens."""


class Where(NamedTuple):
    """A pool's requests of one outcome on one day (UTC). Outcomes: a hit, a rebuild for this request, or why nothing was shared."""

    day: str
    pool_id: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Amount:
    """Of a hit: tokens that were not computed, and the seconds they would have taken. Else: tokens computed, and what they took."""

    n_requests: int = 0
    n_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, more: Amount) -> Amount:
        return Amount(self.n_requests + more.n_requests, self.n_tokens + more.n_tokens, self.seconds + more.seconds)


@dataclass(frozen=True, slots=True)
class Sum:
    """Amounts of several places together."""

    hits: Amount
    misses: Mapping[str, Amount]


def summed(rows: Iterable[tuple[Where, Amount]]) -> Sum:
    """Hits in one, the others by outcome."""
    found: dict[str, Amount] = {}
    for where, amount in rows:
        found[where.outcome] = found.get(where.outcome, Amount()) + amount
    return Sum(found.pop(HIT, Amount()), found)


class Savings:
    """What has come since it was last taken away."""

    def __init__(self) -> None:
        self._pending: dict[Where, Amount] = {}
        self._prompt = Pace()

    def note(self, event: SlotEvent, book: Book | None, now: float) -> tuple[Where, Amount] | None:
        """A task was released: what it adds; None for one without a pool, or one that left before its prompt was through."""
        n_computed, seconds = max(0, event.n_prompt - event.n_cached), event.us_prompt / 1e6
        if n_computed >= MEASURABLE:
            self._prompt = self._prompt.after(n_computed, seconds)
        outcome = _outcome(event, book)
        if outcome is None or book is None or book.pool_id is None:
            return None
        if outcome in {HIT, REBUILT}:
            amount = Amount(1, event.n_shared, event.n_shared / self._prompt.value if self._prompt.value else 0.0)
        else:
            amount = Amount(1, n_computed, seconds)
        where = Where(datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d"), book.pool_id, outcome)
        self.add({where: amount})
        return where, amount

    def add(self, amounts: Mapping[Where, Amount]) -> None:
        """These too, or again: they could not be written down."""
        for where, amount in amounts.items():
            self._pending[where] = self._pending.get(where, Amount()) + amount

    def take(self) -> dict[Where, Amount]:
        """What has come, to be written down; from now on it is the caller's."""
        taken, self._pending = self._pending, {}
        return taken

    @property
    def pending(self) -> Mapping[Where, Amount]:
        """What has come and was not taken away."""
        return self._pending


def _outcome(event: SlotEvent, book: Book | None) -> str | None:
    """1. No pool, or left before its prompt was through; 2. made again for it; 3. shared; 4. why not, by the engine or by us."""
    if book is None or book.pool_id is None or event.us_prompt <= 0:
        return None
    if event.n_shared > 0:
        return REBUILT if book.brought is Brought.REBUILT else HIT
    return event.miss or book.miss
