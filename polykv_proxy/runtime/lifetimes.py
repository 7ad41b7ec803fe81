"""How pools live and end: pins, renewals, eviction, release.

Law: a decision is taken on the whole of what uses a pool, under no await; then the journal, then the engine. What the journal
could not take did not happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from polykv_proxy.core.commands import Command
from polykv_proxy.core.lifetime import Flushed, Lifetime
from polykv_proxy.core.pools import Pool
from polykv_proxy.core.tally import Evicted
from polykv_proxy.errors import ApiError, EngineError, JournalError
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.pools import PoolService
from polykv_proxy.runtime.vault import Vault

log = logging.getLogger("polykv.lifetimes")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Released:
    """What a release did: pools that are gone or go with their last request, running requests, idle sessions that lost theirs."""

    pool_ids: tuple[int, ...]
    n_running: int
    detached: tuple[str, ...]


class LifetimeService:
    """The verbs. Each runs to its end although its caller leaves."""

    def __init__(self, hub: Hub, pools: PoolService, vault: Vault) -> None:
        self._hub = hub
        self._pools = pools
        self._vault = vault
        self._core = Lifetime(hub.ledger)

    async def pin(self, pool_id: int, owner: str | None, lease_s: float | None) -> None:
        """Keep a pool's KV for `lease_s` seconds, or until unpinned. ApiError 507 leaves it as it was."""
        before = self._hub.ledger.tree.get(pool_id)
        await self._written(before, self._core.pin(pool_id, owner, lease_s, self._hub.clock.wall()))

    async def unpin(self, pool_id: int, owner: str | None) -> None:
        """Take the pin away."""
        before = self._hub.ledger.tree.get(pool_id)
        await self._written(before, self._core.unpin(pool_id, owner))

    async def renew(self, pool_id: int, ttl_s: float | None) -> None:
        """Count the pool's time to live from now."""
        before = self._hub.ledger.tree.get(pool_id)
        await self._written(before, self._core.renew(pool_id, ttl_s, self._hub.clock.wall()))

    async def set_ttl(self, pool_id: int, ttl_s: float | None) -> None:
        """Give the pool a time to live that counts from now, or none."""
        before = self._hub.ledger.tree.get(pool_id)
        await self._written(before, self._core.set_ttl(pool_id, ttl_s, self._hub.clock.wall()))

    async def _written(self, before: Pool | None, commands: list[Command]) -> None:
        try:
            await _whole(self._hub.run(commands))
        except JournalError as error:
            if before is not None:
                self._hub.ledger.restore_terms(before)
            raise ApiError("journal_failed", str(error)) from error

    async def evict(self, pool_id: int) -> bool:
        """Drop a pool's KV and keep its tokens; False when it had none. ApiError 409 while anything keeps it.

        What is worth it is copied to disk before, and only what is still idle after that is evicted.
        """
        return await _whole(self._evict(pool_id))

    async def _evict(self, pool_id: int) -> bool:
        self._core.evictable(pool_id)
        await self._vault.keep(pool_id)
        commands = self._core.evict(pool_id)
        self._hub.tally.evictions[Evicted.ASKED] += bool(commands)
        await self._hub.run_each(commands)
        return bool(commands)

    async def flush(self, pool_id: int) -> Flushed:
        """Evict what is idle of a subtree, copied to disk before where that is worth it."""
        return await _whole(self._flush(pool_id))

    async def _flush(self, pool_id: int) -> Flushed:
        for idle_id in self._core.idle(pool_id):
            await self._vault.keep(idle_id)
        flushed = self._core.flush(pool_id)
        self._hub.tally.evictions[Evicted.ASKED] += len(flushed.evicted)
        await self._hub.run_each(flushed.commands)
        return flushed

    async def release(self, pool_id: int, *, recursive: bool = False, over_pins: bool = False) -> Released:
        """Release a pool, or a subtree that nobody uses. Requests that run on it end first; idle sessions lose it."""
        return await _whole(self._release_tree(pool_id, over_pins=over_pins) if recursive else self._release(pool_id))

    async def _release(self, pool_id: int) -> Released:
        flight = self._pools.flight(pool_id)
        before = self._hub.ledger.begin_release(pool_id)
        if flight is not None:
            flight.cancel()
            await flight.ended()
        try:
            await self._hub.journal.drop_pools([pool_id])
        except JournalError as error:
            self._hub.ledger.revert_release(before)
            self._hub.ledger.rebuild_failed(pool_id, "its making was stopped by a release that could not be written down")
            raise ApiError("journal_failed", str(error)) from error
        outcome = self._hub.ledger.commit_release(pool_id)
        await self._hub.run(outcome.commands)
        return Released((pool_id,), outcome.running, outcome.detached)

    async def _release_tree(self, pool_id: int, *, over_pins: bool) -> Released:
        before = self._core.begin_release_tree(pool_id, over_pins=over_pins)
        try:
            await self._hub.journal.drop_pools([pool.pool_id for pool in before])
        except JournalError as error:
            self._core.revert_release_tree(before)
            raise ApiError("journal_failed", str(error)) from error
        outcomes = self._core.commit_release_tree(before)
        for outcome in outcomes:
            await self._hub.run(outcome.commands)
        return Released(tuple(pool.pool_id for pool in before), sum(outcome.running for outcome in outcomes), ())

    async def release_unwanted(self, pool_id: int) -> None:
        """Release what nobody waits for any more, if nobody took it up meanwhile."""
        with contextlib.suppress(ApiError, EngineError, JournalError):
            await self.release(pool_id)

    def end_leases(self) -> None:
        """Take away the pins whose lease is over."""
        self._hub.post(self._core.end_leases(self._hub.clock.wall()))


async def _whole(work: Coroutine[Any, Any, Result]) -> Result:
    return await asyncio.shield(asyncio.ensure_future(work))
