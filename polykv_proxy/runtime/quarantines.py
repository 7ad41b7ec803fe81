"""What is done about KV that failed a check: it is given back, cleaned out of slots, and made anew from tokens.

Law: from the first turn on nothing new attaches to it. Requests that run keep what they have; when they end, their slots are
emptied before anybody else gets them.
"""

from __future__ import annotations

import asyncio
import logging

from polykv_proxy.core.commands import EndSession
from polykv_proxy.core.pools import SeqRef
from polykv_proxy.core.prefix import as_tokens
from polykv_proxy.core.quarantine import Condemned, Quarantine
from polykv_proxy.engine.samples import Ask
from polykv_proxy.engine.wire import SlotState
from polykv_proxy.errors import ApiError, EngineError
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.pools import PoolService

log = logging.getLogger("polykv.quarantine")

CLEAN_S = 2.0
"""How long a slot that was idle is waited for: a request may have got there first, which then ends as any running one."""


class Quarantines:
    """The quarantine of one hub."""

    def __init__(self, hub: Hub, pools: PoolService) -> None:
        self._hub = hub
        self._pools = pools
        self.core = Quarantine(hub.ledger)

    async def replace(self, seq: SeqRef, reason: str) -> tuple[int, ...]:
        """Make all pools anew that hold a cell which this sequence made: their ids. What cannot be made now is made when used."""
        condemned = self.core.condemn(seq, reason)
        log.error("pools %s are made anew from their tokens: %s", list(condemned.pool_ids), reason)
        await self._clear_away(condemned)
        for pool_id in condemned.pool_ids:
            await self._bring(pool_id)
        return condemned.pool_ids

    async def give_up(self, pool_id: int, reason: str) -> None:
        """A pool fails for good: its requests are served without it."""
        await self._clear_away(self.core.give_up(pool_id, reason))

    async def _clear_away(self, condemned: Condemned) -> None:
        async with self._hub.cleaning:
            await self._hub.run_each(condemned.commands)
            await self._clean_slots()

    async def _clean_slots(self) -> None:
        """Idle slots now, working ones as soon as their request is over."""
        try:
            slots = (await self._hub.client.state()).slots
        except EngineError as error:
            log.warning("slots may still hold KV that failed a check: %s", error)
            return
        tainted = [slot for slot in slots if slot.seq and self.core.tainted(SeqRef.parse(slot.seq), slot.n_shared)]
        cleaning = {self._hub.spawn(self._clean(slot)): slot for slot in tainted}
        idle = [work for work, slot in cleaning.items() if slot.state == "idle"]
        if idle:
            await asyncio.wait(idle, timeout=CLEAN_S)

    async def _clean(self, slot: SlotState) -> None:
        """A prompt of one token that keeps nothing of what was there, in a session that then ends."""
        session, req = self._hub.ledger.sessions.take_own(), self._hub.ledger.take_req()
        try:
            await self._hub.client.sample(Ask(as_tokens([0]), req, session, reuse=False, slot=slot.slot))
        except EngineError as error:
            log.warning("slot %d may still hold KV that failed a check: %s", slot.slot, error)
        finally:
            await asyncio.shield(self._hub.spawn(self._hub.run([EndSession(session)])))

    async def _bring(self, pool_id: int) -> None:
        try:
            await self._pools.bring(pool_id)
        except ApiError as error:
            log.warning("pool %d is made anew when it is used: %s", pool_id, error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
