"""Compaction: a shorter prompt takes the place of a long one, as a new pool beside the old.

Law: no cell is ever changed. The new pool is there and written down before anything of the old is touched; sessions move in one
turn; the old subtree goes leaf first, each pool once nobody uses it. Whatever fails, what was there before still is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from polykv_proxy.core.lifetime import Lifetime
from polykv_proxy.errors import ApiError, JournalError
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.lifetimes import LifetimeService
from polykv_proxy.runtime.orders import Made

log = logging.getLogger("polykv.compaction")


@dataclass(frozen=True, slots=True)
class Compacted:
    """Sessions that moved, pools of the old subtree that are gone, and those that go once nobody uses them."""

    migrated: tuple[str, ...]
    released: tuple[int, ...]
    retiring: tuple[int, ...]


class CompactionService:
    """The two steps around the making of the new pool."""

    def __init__(self, hub: Hub, lifetimes: LifetimeService) -> None:
        self._hub = hub
        self._lifetimes = lifetimes
        self._core = Lifetime(hub.ledger)

    def check(self, old_id: int, sessions: Sequence[str]) -> None:
        """Before anything is made: the sessions are there and belong to the old subtree. ApiError 404 or 409 names one."""
        old = {pool.pool_id for pool in self._hub.ledger.tree.subtree(old_id)}
        for name in sessions:
            session = self._hub.ledger.sessions.get(name)
            if session is None:
                raise ApiError("session_not_found", f"there is no session {name!r}", param="migrate")
            if session.pool_id not in old:
                message = f"session {name!r} is attached to pool {session.pool_id}, not to pool {old_id} or one below it"
                raise ApiError("conflict", message, param="migrate", extra={"session_id": name, "pool_id": session.pool_id})

    async def finish(self, old_id: int, made: Made, sessions: Sequence[str]) -> Compacted:
        """After the new pool was made: move the sessions, let the old subtree go. Runs to its end although the caller leaves."""
        return await asyncio.shield(asyncio.ensure_future(self._finish(old_id, made, sessions)))

    async def _finish(self, old_id: int, made: Made, sessions: Sequence[str]) -> Compacted:
        now = self._hub.clock.wall()
        if self._hub.ledger.tree.get(made.pool_id) is None:
            message = f"pool {made.pool_id} was made, and released before the sessions moved; nothing else has changed"
            raise ApiError("pool_not_found", message)
        if old_id in {made.pool_id, *(pool.pool_id for pool in self._hub.ledger.tree.ancestors(made.pool_id))}:
            message = (
                f"pool {made.pool_id}, which has this name and prefix already, is pool {old_id} or below it; choose another name"
            )
            raise ApiError("conflict", message, param="name", extra={"pool_id": made.pool_id})
        migrated = self._core.migrate(sessions, made.pool_id, now)
        if self._hub.ledger.tree.get(old_id) is None:
            return Compacted(migrated, (), ())
        before = self._hub.ledger.tree.subtree(old_id)
        try:
            await self._hub.journal.save_terms(self._core.retire_when_unused(old_id))
        except JournalError as error:
            for pool in before:
                self._hub.ledger.restore_terms(pool)
            message = (
                f"pool {made.pool_id} is there and the sessions have moved, but pool {old_id} stays: {error}; release it yourself"
            )
            extra = {"pool_id": made.pool_id, "migrated": list(migrated)}
            raise ApiError("journal_failed", message, extra=extra) from error
        released = await self._release_unused([pool.pool_id for pool in reversed(before)])
        retiring = [pool.pool_id for pool in before if self._hub.ledger.tree.get(pool.pool_id) is not None]
        return Compacted(migrated, tuple(released), tuple(retiring))

    async def _release_unused(self, leaf_first: Sequence[int]) -> list[int]:
        """What nobody uses goes now; the rest is for the sweeps."""
        released = []
        for pool_id in leaf_first:
            if self._hub.ledger.expired(pool_id, self._hub.clock.wall()):
                try:
                    await self._lifetimes.release(pool_id)
                    released.append(pool_id)
                except ApiError as error:
                    log.info("pool %d goes later: %s", pool_id, error)
        return released
