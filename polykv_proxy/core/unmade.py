"""Pools that could not be made, of which somebody was told to come back for the outcome: the reason, for a while.

Law: they hold nothing and are written down nowhere, so a restart forgets them, and they stand in nobody's way: they go when their
time is over, or sooner, when room for a new pool or their name is wanted. Nothing is promised of a pool whose tokens nobody knows.
"""

from __future__ import annotations

from dataclasses import replace

from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.pools import Failure, Pool, Residency
from polykv_proxy.errors import ApiError

UNMADE_S = 300.0
"""Seconds for which the reason can be read, from the last try."""


class Unmade:
    """The pools of one ledger that could not be made. Times are Unix seconds."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tree = ledger.tree

    def discard(self, pool_id: int, now: float, reason: str | None = None, *, lasting: bool = True) -> None:
        """A pool could not be made. Forget it, or keep it as `failed` where there is a reason to be read, or requests wait for it.

        `lasting`: another try would fail as well. Else the next request that names it is one.
        """
        pool = self._tree.get(pool_id)
        if pool is None:
            return
        self._ledger.forget_placement(pool_id)
        waited_for = bool(self._ledger.books.of_pool(pool_id))
        if pool.prefix_len and (reason is not None or waited_for):
            failed = pool.displaced(Residency.FAILED, reason or "it could not be made")
            self._tree.put(replace(failed, failure=Failure(now + UNMADE_S, lasting)))
        else:
            self._ledger.remove(pool)

    def make_room(self) -> None:
        """Room for one more record: what could not be made goes, the oldest first. ApiError 429 where that is not enough."""
        limit = self._ledger.limits.max_pool_objects
        for pool in self._failed():
            if len(self._tree) < limit:
                break
            if not self._ledger.books.of_pool(pool.pool_id):
                self._ledger.remove(pool)
        if len(self._tree) >= limit:
            raise ApiError(
                "too_many_pools",
                f"there are {len(self._tree)} pools and at most {limit} may exist (--max-pool-objects); release some",
                extra={"n_pools": len(self._tree), "max_pool_objects": limit},
            )

    def make_way(self, pool: Pool) -> None:
        """Somebody else wants the name of a pool that could not be made; what runs without it goes on."""
        if self._ledger.books.of_pool(pool.pool_id):
            self._tree.put(replace(pool, name=None))
        else:
            self._ledger.remove(pool)

    def sweep(self, now: float) -> None:
        """Forget those whose time is over, by a clock that may have been set, once no request runs without them."""
        for pool in self._failed():
            over = pool.failure is not None and not now < pool.failure.until_ts <= now + UNMADE_S
            if over and not self._ledger.books.of_pool(pool.pool_id):
                self._ledger.remove(pool)

    def _failed(self) -> list[Pool]:
        return [pool for pool in self._tree if pool.unmade]
