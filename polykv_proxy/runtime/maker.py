"""Sequences of the engine: made, given back, and looked for when one may have been made unheard.

Law: whoever is handed a sequence owns it; what is made and then not wanted goes back at once, or with the next sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import numpy as np

from polykv_proxy.core.pools import Pool, SavedCopy, SeqRef
from polykv_proxy.engine import wire
from polykv_proxy.errors import EngineError, EngineRefusedError
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.room import Room
from polykv_proxy.runtime.vault import Vault, patience_s

log = logging.getLogger("polykv.maker")


class Maker:
    """Makes sequences in the engine."""

    def __init__(self, hub: Hub, vault: Vault) -> None:
        self._hub = hub
        self._vault = vault
        self.room = Room(hub, vault)

    async def make(self, body: Mapping[str, object], report: Callable[[wire.Progress], None], n_cells: int = 0) -> wire.Made:
        """Materialise or snapshot, idle pools making room where it lacks; `n_cells` is what it needs beyond its parent's.

        Cancelled, or failed: nothing is left behind, at the latest after a sweep.
        """
        await self.room.for_cells(n_cells)
        while True:
            since = self._hub.clock.monotonic()
            try:
                made = await self._try(body, report)
            except EngineRefusedError as error:
                if not await self.room.after(error):
                    raise
            else:
                self._hub.rates.prefill.note(n_cells, self._hub.clock.monotonic() - since)
                return made

    async def restore(self, pool: Pool, copy: SavedCopy, parent: SeqRef | None, may_evict: Callable[[], bool]) -> wire.Made:
        """A sequence from a pool's copy, with the pool's tokens in it. Room as above, while `may_evict` allows it.

        EngineRefusedError `file_refused` also for a file that holds other tokens.
        """
        if may_evict():
            await self.room.for_cells(pool.prefix_len - copy.start)
        while True:
            try:
                return await self._try_restore(pool, copy, parent)
            except EngineRefusedError as error:
                if not may_evict() or not await self.room.after(error):
                    raise

    async def _try_restore(self, pool: Pool, copy: SavedCopy, parent: SeqRef | None) -> wire.Made:
        file, since = self._vault.folder.file(pool.pool_id), self._hub.clock.monotonic()
        boot_id = self._hub.boot_id
        try:
            async with asyncio.timeout(patience_s(copy.n_bytes)):
                made = await self._hub.client.restore_seq(file, parent)
            self._hub.rates.read.note(copy.n_bytes, self._hub.clock.monotonic() - since)
            tokens = await self._hub.client.seq_tokens(made.ref)
        except TimeoutError:
            self._hub.suspect()
            raise EngineError(f"reading {file} took longer than {patience_s(copy.n_bytes):.0f} s") from None
        except (asyncio.CancelledError, EngineError):
            self._hub.suspect()
            raise
        if not np.array_equal(tokens, pool.tokens):
            await self.give_back(made.ref, boot_id)
            raise EngineRefusedError(409, "file_refused", "it holds the tokens of another pool")
        return made

    async def _try(self, body: Mapping[str, object], report: Callable[[wire.Progress], None]) -> wire.Made:
        stream = self._hub.client.make_seq(body)
        try:
            async with contextlib.aclosing(stream):
                async for step in stream:
                    if isinstance(step, wire.Made):
                        return step
                    report(step)
        except (asyncio.CancelledError, EngineError):
            self._hub.suspect()
            raise
        raise EngineError("the engine ended a materialisation without a result")

    async def give_back(self, seq: SeqRef, boot_id: str) -> None:
        """Free a sequence that nobody wants, if that is still its boot."""
        if boot_id != self._hub.boot_id:
            return
        try:
            await self._hub.client.free_seq(seq)
        except EngineError as error:
            log.warning("sequence %s is given back later: %s", seq, error)
            self._hub.suspect()
