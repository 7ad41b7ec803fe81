"""Sequences of the engine: made, given back, and looked for when one may have been made unheard.

Law: whoever is handed a sequence owns it; what is made and then not wanted goes back at once, or with the next sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from polykv_proxy.core.pools import SeqRef
from polykv_proxy.engine import wire
from polykv_proxy.errors import EngineError, EngineRefusedError
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.room import Room

log = logging.getLogger("polykv.maker")


class Maker:
    """Makes sequences in the engine."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.room = Room(hub)

    async def make(self, body: Mapping[str, object], report: Callable[[wire.Progress], None], n_cells: int = 0) -> wire.Made:
        """Materialise or snapshot, idle pools making room where it lacks; `n_cells` is what it needs beyond its parent's.

        Cancelled, or failed: nothing is left behind, at the latest after a sweep.
        """
        await self.room.for_cells(n_cells)
        while True:
            try:
                return await self._try(body, report)
            except EngineRefusedError as error:
                if not await self.room.after(error):
                    raise

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
