"""What the engine may give up by itself when its cells run out: sequences of idle pools, in the order in which they would leave.

Law: the core says which; the engine is told again when that has changed. A list that is late costs a rebuild, never an answer:
a sequence that is gone is served without.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set

from polykv_proxy.core.lifetime import Lifetime
from polykv_proxy.core.pools import SeqRef
from polykv_proxy.errors import EngineError
from polykv_proxy.runtime.hub import Hub

log = logging.getLogger("polykv.expendables")


class Expendables:
    """Keeps one engine's list. `spare`: pools that stay though nobody uses them."""

    def __init__(self, hub: Hub, spare: Callable[[], Set[int]]) -> None:
        self._hub = hub
        self._spare = spare
        self._core = Lifetime(hub.ledger)
        self._told: tuple[str, list[SeqRef]] = ("", [])
        self._turn = asyncio.Lock()
        self._taken = asyncio.Event()

    def taken(self, seq: SeqRef) -> None:
        """A request goes to this sequence: it comes off the list soon."""
        if seq in self._told[1]:
            self._taken.set()

    async def run(self) -> None:
        """Look again whenever one was taken, for ever."""
        while True:
            await self._taken.wait()
            self._taken.clear()
            await self.refresh()

    async def refresh(self) -> None:
        """Tell the engine what has changed, if anything has. On a split cache no pool makes room for another."""
        async with self._turn:
            hub = self._hub
            if not hub.linked or hub.hello is None or not hub.hello.kv.unified:
                return
            boot_id, order = hub.boot_id, self._core.expendable(hub.clock.wall(), self._spare())
            if order == (self._told[1] if self._told[0] == boot_id else []):
                return
            try:
                await hub.client.set_expendable(order)
            except EngineError as error:
                log.info("the engine was not told what it may give up: %s", error)
                return
            self._told = (boot_id, order)
