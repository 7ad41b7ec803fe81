"""What pools spared, and what they did not: tokens and time of prompts, by pool, day and outcome.

Law: pure; amounts are only added. Time is that of computing alone, by what a token of a prompt costs (prompt_cost.py): waits for
others are in no amount.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from polykv_proxy.core.books import Book, Brought
from polykv_proxy.core.events import SlotEvent, SlotEventKind
from polykv_proxy.core.prompt_cost import PromptCost

HIT = "hit"
REBUILT = "rebuilt"


class Where(NamedTuple):
    """A pool's requests of one outcome on one day (UTC). Outcomes: a hit, a rebuild for this request, or why nothing was shared."""

    day: str
    pool_id: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Amount:
    """Tokens and seconds of computing: of a hit those that were spared, else those that were not."""

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
        self.cost = PromptCost()

    def note(self, event: SlotEvent, book: Book | None, now: float) -> tuple[Where, Amount] | None:
        """What a released task adds; None before, for one without a pool, or one that left before its prompt was through."""
        self.cost.saw(event)
        outcome = _outcome(event, book) if event.kind is SlotEventKind.RELEASED else None
        if outcome is None or book is None or book.pool_id is None:
            return None
        each = self.cost.s_per_token or 0.0
        if outcome in {HIT, REBUILT}:
            amount = Amount(1, event.n_shared, event.n_shared * each)
        else:
            n_computed = max(0, event.n_prompt - event.n_cached)
            amount = Amount(1, n_computed, min(n_computed * each, event.us_prompt / 1e6))
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
