"""Self-checks at intervals: idle pools are verified while nobody wants the engine.

Law: one pool at a time, the one that was verified longest ago first, and only where a slot is free that holds no session. The first
request of a user ends it at once; what was computed until then is lost.
"""

from __future__ import annotations

import asyncio
import logging

from polykv_proxy.core.pools import Pool, Residency
from polykv_proxy.errors import EngineError
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.pools import PoolService
from polykv_proxy.runtime.verifier import Checked, CheckOrder, Verifier

log = logging.getLogger("polykv.verify")

QUIET_S = 5.0
"""How long nobody must have asked for anything."""
TICK_S = 1.0


class SelfCheck:
    """Checks the pools of one hub. A pool is due `interval_s` after it was made or last looked at."""

    def __init__(self, hub: Hub, pools: PoolService, verifier: Verifier, interval_s: float) -> None:
        self._hub = hub
        self._pools = pools
        self._verifier = verifier
        self._interval_s = interval_s
        self._tried: dict[int, float] = {}
        self._asked_at = hub.clock.monotonic()
        self._waiting: asyncio.Task[Checked] | None = None

    def give_way(self) -> None:
        """Somebody wants the engine."""
        self._asked_at = self._hub.clock.monotonic()
        if self._waiting is not None:
            self._waiting.cancel()

    async def run(self) -> None:
        """Check for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    async def tick(self) -> None:
        """Check the pool that is most due, if there is one and all is quiet."""
        pool = self._due()
        if pool is None or not await self._quiet():
            return
        self._waiting = asyncio.get_running_loop().create_task(self._check(pool.pool_id))
        try:
            await asyncio.wait({self._waiting})
        finally:
            self._waiting.cancel()
        if not self._waiting.cancelled():
            self._tried[pool.pool_id] = self._hub.clock.wall()
            if (error := self._waiting.exception()) is not None:
                log.info("pool %d was not verified: %s", pool.pool_id, error)
        self._waiting = None

    async def _check(self, pool_id: int) -> Checked:
        return await self._verifier.verify(pool_id, CheckOrder()).wait()

    def _due(self) -> Pool | None:
        tree, now = self._hub.ledger.tree, self._hub.clock.wall()
        self._tried = {pool_id: ts for pool_id, ts in self._tried.items() if tree.get(pool_id) is not None}
        waited = [
            (max(pool.checks.last_ts or pool.created_ts, self._tried.get(pool.pool_id, 0.0)), pool.pool_id)
            for pool in tree
            if pool.residency is Residency.RESIDENT
        ]
        oldest, pool_id = min(waited, default=(now, 0))
        return tree.get(pool_id) if now - oldest >= self._interval_s else None

    async def _quiet(self) -> bool:
        """Nobody asked of late, nothing runs or is being made, and a slot is there that no session would miss."""
        hub = self._hub
        quiet_s = hub.clock.monotonic() - self._asked_at
        if not hub.linked or quiet_s < QUIET_S or len(hub.ledger.books) or self._pools.busy:
            return False
        try:
            slots = (await hub.client.state()).slots
        except EngineError:
            return False
        asked_meanwhile = hub.clock.monotonic() - self._asked_at < QUIET_S
        return not asked_meanwhile and all(slot.state == "idle" for slot in slots) and any(not slot.session for slot in slots)
