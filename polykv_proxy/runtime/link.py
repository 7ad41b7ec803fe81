"""The line to the engine: hello, events, and what follows when it breaks.

Law: one task; it never ends by itself. Records are reconciled on the greeting of each connection, before any event of it is taken
in, so that nothing that happened in between is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from polykv_proxy.core.boots import Boots
from polykv_proxy.core.events import SeqGivenUp, SlotEvent
from polykv_proxy.core.lifetime import Lifetime
from polykv_proxy.core.tally import Evicted
from polykv_proxy.engine.events import EngineEvents, Resync
from polykv_proxy.engine.wire import Counters
from polykv_proxy.errors import EngineAbilityError, EngineError, EngineUnavailableError
from polykv_proxy.runtime.hub import Hub

log = logging.getLogger("polykv.link")

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 2.0
SETTLE_S = 5.0
ABSENT_RETRY_S = 60.0
"""An engine without verbs is asked again now and then: with `--engine-url` another one may have taken its place."""


class EngineLink:
    """Keeps the ledger in step with the engine. `remedy`: what helps when it turns out to have no pools."""

    def __init__(self, hub: Hub, remedy: str) -> None:
        self._hub = hub
        self._remedy = remedy
        self._events = EngineEvents(hub.client)
        self._changed = asyncio.Event()
        self._poked = asyncio.Event()
        self._retry_s = FIRST_RETRY_S
        self._level = logging.WARNING

    def poke(self) -> None:
        """Something about the engine changed (it was started, or exited): look at once."""
        self._poked.set()

    def expect_end(self) -> None:
        """The engine is being ended on purpose: nothing that its line does from now on is news."""
        self._level = logging.DEBUG

    def gone(self, reason: str) -> None:
        """The engine's process is not there: known before its connections tell."""
        self._lost(reason)

    async def settled(self) -> None:
        """Wait until the engine of this moment is followed, or known to have no pools; not longer than `SETTLE_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while not self._hub.linked and self._hub.absent is None:
                    await self._change()

    async def known(self) -> None:
        """Wait until it is known whether this engine has pools."""
        while self._hub.hello is None and self._hub.absent is None:
            await self._change()

    async def other_boot(self, boot_id: str) -> None:
        """Wait until an engine of another boot than this is followed, or is known to have no pools."""
        while self._hub.absent is None and not (self._hub.linked and self._hub.boot_id != boot_id):
            await self._change()

    async def present(self) -> None:
        """Wait until an engine with pools is there, after one without."""
        while self._hub.absent is not None:
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def run(self) -> None:
        """Connect, follow, and connect again, for ever."""
        while True:
            try:
                await self._follow()
            except EngineAbilityError as error:
                self._set_absent(str(error), error.remedy or self._remedy)
            except EngineUnavailableError as error:
                self._lost(str(error))
            except EngineError as error:
                log.log(self._level, "engine events: %s", error)
            await self._pause()

    async def _follow(self) -> None:
        hello = await self._hub.client.hello()
        if hello.max_pools == 0:
            log.info("the engine has pools switched off (max_pools 0)")
        try:
            async for event in self._events.listen():
                if isinstance(event, Counters):
                    self._hub.telemetry.counted(event)
                    self._hub.on_heard(None)
                elif isinstance(event, SlotEvent):
                    self._hub.telemetry.saw(event)
                    self._hub.on_heard(event)
                    self._hub.post(self._hub.ledger.engine_event(event, self._hub.clock.wall()))
                elif isinstance(event, SeqGivenUp):
                    self._gave_up(event)
                else:
                    if isinstance(event, Resync):
                        self._hub.telemetry.missed()
                    await self._reconcile()
                    self._hub.on_heard(None)
        except EngineUnavailableError as error:
            raise EngineError(f"the event stream broke: {error}") from error
        log.debug("the event stream ended")

    def _gave_up(self, event: SeqGivenUp) -> None:
        commands = Lifetime(self._hub.ledger).given_up(event.seq)
        self._hub.tally.evictions[Evicted.ENGINE] += bool(commands)
        self._hub.post(commands)

    async def _reconcile(self) -> None:
        hub = self._hub
        hello = await hub.client.hello()
        state = await hub.client.state()
        if state.boot_id != hello.boot_id:
            raise EngineError("the engine started anew while it was being read")
        if hub.ledger.facts is not None and hub.ledger.facts.boot_id != hello.boot_id:
            log.warning("the engine started anew (boot %s): its pools are lost and are rebuilt when used", hello.boot_id)
        hub.post(Boots(hub.ledger).ready(hello.facts(), state.snapshot(), hub.clock.wall()))
        hub.hello, hub.linked, hub.absent = hello, True, None
        hub.telemetry.engine_ready(hello, state)
        self._retry_s = FIRST_RETRY_S
        self._changed.set()

    def _lost(self, reason: str) -> None:
        if self._hub.linked:
            log.log(self._level, "lost the engine: %s", reason)
            self._hub.telemetry.engine_away("lost", reason)
        self._hub.linked = False
        Boots(self._hub.ledger).lost(reason)
        self._hub.on_heard(None)

    def _set_absent(self, reason: str, remedy: str) -> None:
        if self._hub.absent is None:
            log.warning("pools are off: %s. Requests are relayed as they come; /polykv/* answers 501", reason)
            self._hub.telemetry.engine_away("absent", reason)
        self._hub.linked = False
        self._hub.absent, self._hub.remedy = reason, remedy
        self._changed.set()

    async def _pause(self) -> None:
        self._retry_s = min(self._retry_s * 2, LAST_RETRY_S)
        try:
            async with asyncio.timeout(ABSENT_RETRY_S if self._hub.absent is not None else self._retry_s):
                await self._poked.wait()
        except TimeoutError:
            pass
        self._poked.clear()
