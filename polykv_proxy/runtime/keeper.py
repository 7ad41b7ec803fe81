"""Quiet moments: what a boot took away is read back from disk, pools without a copy get one, and before the end all of them do.

Law: one thing at a time, never in anybody's way. What is read back takes only room that is free, and only what was resident before;
it is the same work that a request for the pool would begin, and would join.
"""

from __future__ import annotations

import asyncio
import logging

from polykv_proxy.core.pools import REBUILDABLE, Pool, Residency
from polykv_proxy.core.vault import hottest_first, leaves_spare, revival
from polykv_proxy.engine.wire import State
from polykv_proxy.errors import EngineError
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.pools import PoolService
from polykv_proxy.runtime.vault import Vault

log = logging.getLogger("polykv.keeper")

QUIET_S = 2.0
"""For how long nothing must have run before copies are made: turns of a conversation follow one another more closely."""


class Keeper:
    """Keeps one hub's copies and its cache in step when there is time."""

    def __init__(self, hub: Hub, pools: PoolService, vault: Vault) -> None:
        self._hub = hub
        self._pools = pools
        self._vault = vault
        self._last_work: object = None
        self._still_since = hub.clock.monotonic()
        self._ending = self._hurried = False
        self._grace: asyncio.Timeout | None = None

    async def run(self, every_s: float) -> None:
        """Look for something to do, for ever."""
        while True:
            try:
                worked = await self.step()
            except EngineError as error:
                log.info("nothing done: %s", error)
                worked = False
            if not worked:
                await asyncio.sleep(every_s)

    async def step(self) -> bool:
        """Do one thing; False when there is nothing to do, or it is not the time."""
        if not self._vault.on or not self._hub.linked or self._ending:
            return False
        return await self._read_back() or await self._copy_one()

    def end(self) -> None:
        """Begin nothing more of one's own."""
        self._ending = True

    def hurry(self) -> None:
        """Leave no time for copies before the end."""
        self._hurried = True
        if self._grace is not None and not self._grace.expired():
            self._grace.reschedule(0.0)

    async def copy_all(self, within_s: float) -> None:
        """Before the end: copies of what is resident, hottest first, as far as the time goes."""
        try:
            async with asyncio.timeout(0.0 if self._hurried else within_s) as self._grace:
                for pool in self._lacking():
                    await self._vault.keep(pool.pool_id, in_passing=True)
        except TimeoutError:
            log.warning("no copies of pools %s: the time was over", [pool.pool_id for pool in self._lacking()])
        finally:
            self._grace = None

    def _lacking(self) -> list[Pool]:
        tree = self._hub.ledger.tree
        return hottest_first([pool for pool in tree if self._vault.lacks(pool)], tree) if self._hub.linked else []

    # -- after a boot ---------------------------------------------------------------------------------------------------------

    async def _read_back(self) -> bool:
        ledger = self._hub.ledger
        order = revival(ledger.tree, ledger.fallen)
        if not order:
            return False
        state = await self._hub.client.state()
        pool = ledger.tree.get(order[0].pool_id)
        if state.phase != "ready" or pool is None or pool.copy is None or pool.residency not in REBUILDABLE:
            return False
        if not self._has_room(pool.prefix_len - pool.copy.start, state):
            log.info("no room for more: pools %s come back when they are used", [left.pool_id for left in order])
            ledger.fallen.clear()
            return False
        ledger.fallen.discard(pool.pool_id)
        await self._pools.rebuild(pool.pool_id, unasked=True).ended()
        log.info("pool %d was read back from disk: %s", pool.pool_id, pool.seq is not None)
        return True

    def _has_room(self, n_cells: int, state: State) -> bool:
        """Is there a sequence id, and where sequences share their cells, are enough left for others?"""
        hello = self._hub.hello
        taken = sum(pool.seq is not None or pool.residency is Residency.MATERIALIZING for pool in self._hub.ledger.tree)
        if hello is None or max(taken, len(state.seqs)) >= hello.max_pools:
            return False
        return not hello.kv.unified or leaves_spare(n_cells, state.cells.total - state.cells.used, state.cells.total)

    # -- when nothing runs ----------------------------------------------------------------------------------------------------

    async def _copy_one(self) -> bool:
        lacking = self._lacking()
        if not lacking or not await self._quiet():
            return False
        for pool in lacking:
            if await self._vault.keep(pool.pool_id, in_passing=True):
                return True
        return False

    async def _quiet(self) -> bool:
        """Has the engine done nothing for a while? Short work between two looks shows in its counters."""
        now, work = self._hub.clock.monotonic(), None
        if not len(self._hub.ledger.books):
            state = await self._hub.client.state()
            idle = state.phase == "ready" and all(slot.state == "idle" for slot in state.slots)
            work = state.work() if idle else None
        if work is None or work != self._last_work:
            self._last_work, self._still_since = work, now
        return now - self._still_since >= QUIET_S
