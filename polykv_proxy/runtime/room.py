"""Room for a sequence: idle pools give up theirs when ids or cells run out.

Law: the core says who leaves; nothing leaves while it is used, kept or in vain. Each round evicts at least one pool or gives up. On
a split cache every pool has room of its own with its id: only ids run out.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Set

from polykv_proxy.core.commands import FreeSeq
from polykv_proxy.core.lifetime import Lifetime
from polykv_proxy.core.pools import REBUILDABLE, Pool, Residency
from polykv_proxy.core.retention import leaving
from polykv_proxy.core.tally import Evicted
from polykv_proxy.engine.wire import State
from polykv_proxy.errors import ApiError, EngineError, EngineRefusedError, JournalError
from polykv_proxy.runtime.expendables import Expendables
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.vault import Vault

log = logging.getLogger("polykv.room")

LOW_CELLS = 0.05
"""With less than this part of all cells free or idle, idle pools give up theirs before a running request has to stop."""


class Room:
    """Makes room in the engine for one hub. Pools in `spare` stay, though nobody uses them."""

    def __init__(self, hub: Hub, vault: Vault) -> None:
        self._hub = hub
        self._vault = vault
        self.spare: Set[int] = frozenset()
        self.expendables = Expendables(hub, lambda: self.spare)
        self._lifetime = Lifetime(hub.ledger)

    def can_bring(self, parent: Pool) -> bool:
        """Is a parent without KV being made, or are there ids for it, for all above it that lack KV, and for a child of it?"""
        if parent.residency not in REBUILDABLE:
            return parent.residency is Residency.MATERIALIZING
        hello, tree = self._hub.hello, self._hub.ledger.tree
        line = (parent, *tree.ancestors(parent.pool_id))
        lacking = sum(1 for _ in itertools.takewhile(lambda pool: pool.residency in REBUILDABLE, line))
        used = sum(pool.seq is not None for pool in tree)
        evictable = sum(1 for _ in leaving(self._lifetime.candidates(self._hub.clock.wall(), self.spare)))
        return hello is not None and hello.max_pools - used + evictable > lacking

    async def has(self, n_cells: int) -> bool:
        """Are so many cells free or idle that even without them the cache is not low?"""
        if not self._shares_cells():
            return True
        state = await self._hub.client.state()
        return not state.cells.total or _available(state) - n_cells >= LOW_CELLS * state.cells.total

    async def for_cells(self, n_cells: int) -> None:
        """Before a prefill: as many cells as it needs beyond what is free or idle. What cannot be had is the engine's to refuse.

        A recurrent model has no cells (their total is 0): its sequences are one state each.
        """
        if n_cells:
            await self.expendables.refresh()
        while n_cells and self._shares_cells():
            state = await self._hub.client.state()
            lacking = n_cells - _available(state)
            if not state.cells.total or lacking <= 0 or not await self._evict(n_cells=lacking):
                return

    async def after(self, refused: EngineRefusedError) -> bool:
        """After a refusal: was something evicted, so that another try makes sense? ApiError 429 when all cells are in use."""
        if refused.kind == "no_seq_ids":
            return await self._evict(n_ids=1)
        if refused.kind not in {"too_long", "no_cells"}:
            return False
        if await self._evict(n_ids=1):
            return True
        message = "the cache is full, and all that it holds is in use or kept; try again later, or start with a larger context"
        raise ApiError("saturated", message, retry_after_s=5)

    async def relieve(self) -> None:
        """In quiet times: evict an idle pool when the cache is low."""
        try:
            if not await self.has(0):
                await self._evict(n_ids=1)
        except EngineError as error:
            log.info("no room was made: %s", error)

    def _shares_cells(self) -> bool:
        return self._hub.hello is not None and self._hub.hello.kv.unified

    async def _evict(self, *, n_ids: int = 0, n_cells: int = 0) -> bool:
        """Evict by the core's choice; False when there was nothing, or the engine did not take it back."""
        await self._copy_first(n_ids, n_cells)
        chosen, commands = self._lifetime.retire(self._hub.clock.wall(), n_ids=n_ids, n_cells=n_cells, spare=self.spare)
        taken = bool(chosen)
        for command in commands:
            try:
                if isinstance(command, FreeSeq):
                    await self._hub.client.free_seq(command.seq)
                else:
                    await self._hub.run([command])
            except EngineError as error:
                log.warning("sequence of an evicted pool is given back later: %s", error)
                self._hub.suspect()
                taken = False
            except JournalError as error:
                log.warning("an eviction was not written down: %s", error)
        self._hub.tally.evictions[Evicted.ROOM] += len(chosen)
        if chosen:
            log.info("pools %s were evicted to make room", chosen)
        return taken

    async def _copy_first(self, n_ids: int, n_cells: int) -> None:
        """Copy to disk what would leave. That takes a while, and who leaves is chosen anew after it; each is tried once."""
        tried: set[int] = set()
        while self._vault.on:
            leaving = self._lifetime.leaving(self._hub.clock.wall(), n_ids=n_ids, n_cells=n_cells, spare=self.spare)
            lacking = (i for i in leaving if i not in tried and self._vault.lacks(self._hub.ledger.tree.get(i)))
            pool_id = next(lacking, None)
            if pool_id is None:
                return
            tried.add(pool_id)
            await self._vault.keep(pool_id)


def _available(state: State) -> int:
    """Cells that are free, or owned by idle slots: the engine takes those for itself when it needs them."""
    idle = sum(slot.own_cells for slot in state.slots if slot.state == "idle")
    return state.cells.total - state.cells.used + idle
