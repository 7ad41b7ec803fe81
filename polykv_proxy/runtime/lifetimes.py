"""How pools end.

Law: a decision is taken on the whole of what uses a pool, under no await; then the journal, then the engine. What the journal
could not take did not happen.
"""

from __future__ import annotations

import asyncio

from polykv_proxy.errors import ApiError, JournalError
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.pools import PoolService


class LifetimeService:
    """Releases pools."""

    def __init__(self, hub: Hub, pools: PoolService) -> None:
        self._hub = hub
        self._pools = pools

    async def release(self, pool_id: int) -> tuple[int, tuple[str, ...]]:
        """Release a pool: how many requests still run on it (it goes with the last), and which idle sessions lost it."""
        return await asyncio.shield(asyncio.ensure_future(self._release(pool_id)))

    async def _release(self, pool_id: int) -> tuple[int, tuple[str, ...]]:
        flight = self._pools.flight(pool_id)
        before = self._hub.ledger.begin_release(pool_id)
        if flight is not None:
            flight.cancel()
            await flight.ended()
        try:
            await self._hub.journal.drop_pool(pool_id)
        except JournalError as error:
            self._hub.ledger.revert_release(before)
            self._hub.ledger.rebuild_failed(pool_id, "its making was stopped by a release that could not be written down")
            raise ApiError("journal_failed", str(error)) from error
        outcome = self._hub.ledger.commit_release(pool_id)
        await self._hub.run(outcome.commands)
        return outcome.running, outcome.detached
