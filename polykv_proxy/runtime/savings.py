"""Savings over days and restarts: kept in memory, written down every few seconds.

Law: a crash loses the last seconds of it and nothing else; a disk that is full loses nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from polykv_proxy.core.books import Book
from polykv_proxy.core.events import SlotEvent
from polykv_proxy.core.savings import HIT, Amount, Savings, Sum, Where, summed
from polykv_proxy.errors import JournalError
from polykv_proxy.ports import Clock
from polykv_proxy.runtime.journal import Journal

WRITE_EVERY_S = 10.0
DAYS_BY_POOL = 31
DAYS = 400
"""Of days longer ago than the first only the sum over all pools is kept, as pool 0; of those longer ago than the second nothing."""

_ADD = """
    INSERT INTO savings (day, pool_id, outcome, n_requests, n_tokens, seconds) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (day, pool_id, outcome) DO UPDATE SET n_requests = n_requests + excluded.n_requests,
                       n_tokens = n_tokens + excluded.n_tokens, seconds = seconds + excluded.seconds
"""
_FOLD = """
    INSERT INTO savings SELECT day, 0, outcome, sum(n_requests), sum(n_tokens), sum(seconds) FROM savings
    WHERE day < ? AND pool_id != 0 GROUP BY day, outcome
    ON CONFLICT (day, pool_id, outcome) DO UPDATE SET n_requests = n_requests + excluded.n_requests,
                       n_tokens = n_tokens + excluded.n_tokens, seconds = seconds + excluded.seconds
"""
_READ = "SELECT day, pool_id, outcome, n_requests, n_tokens, seconds FROM savings WHERE day >= ?"
_LIVING = """
    SELECT '', pool_id, outcome, sum(n_requests), sum(n_tokens), sum(seconds) FROM savings
    WHERE pool_id IN (SELECT pool_id FROM pools) GROUP BY pool_id, outcome
"""
_ALL = "SELECT '', 0, outcome, sum(n_requests), sum(n_tokens), sum(seconds) FROM savings GROUP BY outcome"


class SavingsBook:
    """The savings of one proxy."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._savings = Savings()
        self._of_pool: dict[int, dict[Where, Amount]] = {}
        self._of_all: dict[Where, Amount] = {}
        self._written_at = clock.monotonic()
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Read the sums of earlier runs."""
        self._of_all = dict(await self._journal.read(lambda db: _rows(db.execute(_ALL))))
        for where, amount in await self._journal.read(lambda db: _rows(db.execute(_LIVING))):
            self._of_pool.setdefault(where.pool_id, {})[where] = amount

    def note(self, event: SlotEvent, book: Book | None) -> float:
        """What became of a task. About how many seconds a pool spared it, once it is released."""
        noted = self._savings.note(event, book, self._clock.wall())
        if noted is not None:
            where, amount = noted
            for sums, pool_id in ((self._of_all, 0), (self._of_pool.setdefault(where.pool_id, {}), where.pool_id)):
                key = Where("", pool_id, where.outcome)
                sums[key] = sums.get(key, Amount()) + amount
        return noted[1].seconds if noted is not None and noted[0].outcome == HIT else 0.0

    def boot(self, boot_id: str) -> None:
        """The engine that is followed from now on."""
        self._savings.cost.boot(boot_id)

    def missed(self) -> None:
        """Events of the engine did not reach us."""
        self._savings.cost.missed()

    def forget(self, pool_id: int) -> None:
        """A pool is gone: what it spared is in the sum of all, and written down."""
        self._of_pool.pop(pool_id, None)

    def of_pool(self, pool_id: int) -> Sum:
        """Everything that a pool ever spared, and did not."""
        return summed(self._of_pool.get(pool_id, {}).items())

    def of_all(self) -> Sum:
        """The same of all pools, those that are gone too."""
        return summed(self._of_all.items())

    async def since(self, days: int) -> dict[Where, Amount]:
        """Amounts of the last `days` days, today included, by day, pool and outcome."""
        first = self._day(days - 1)
        async with self._writing:
            found = dict(await self._journal.read(lambda db: _rows(db.execute(_READ, (first,)))))
        for where, amount in self._savings.pending.items():
            if where.day >= first:
                found[where] = found.get(where, Amount()) + amount
        return found

    async def sweep(self) -> None:
        """Write down what has come, now and then. JournalError: later."""
        if self._savings.pending and self._clock.monotonic() - self._written_at >= WRITE_EVERY_S:
            await self.write()

    async def write(self) -> None:
        """Write down what has come, and forget what is very old. JournalError: nothing is lost."""
        async with self._writing:
            self._written_at = self._clock.monotonic()
            taken = self._savings.take()
            rows = [(*where, amount.n_requests, amount.n_tokens, amount.seconds) for where, amount in taken.items()]
            old, oldest = self._day(DAYS_BY_POOL), self._day(DAYS)

            def write(db: sqlite3.Connection) -> None:
                db.executemany(_ADD, rows)
                db.execute(_FOLD, (old,))
                db.execute("DELETE FROM savings WHERE day < ? OR (day < ? AND pool_id != 0)", (oldest, old))

            try:
                await self._journal.transact(write)
            except JournalError:
                self._savings.add(taken)
                raise

    def _day(self, ago: int) -> str:
        return (datetime.fromtimestamp(self._clock.wall(), UTC) - timedelta(days=ago)).strftime("%Y-%m-%d")


def _rows(found: Iterable[tuple[str, int, str, int, int, float]]) -> list[tuple[Where, Amount]]:
    return [(Where(*row[:3]), Amount(*row[3:])) for row in found]


def as_object(sums: Sum) -> Mapping[str, object]:
    """As it is shown."""
    misses = {outcome: _plain(amount) for outcome, amount in sorted(sums.misses.items())}
    return {**_plain(sums.hits), "misses": misses}


def _plain(amount: Amount) -> dict[str, object]:
    return {"n_requests": amount.n_requests, "n_tokens": amount.n_tokens, "seconds": round(amount.seconds, 3)}
