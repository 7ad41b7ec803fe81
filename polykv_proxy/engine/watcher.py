"""An engine that somebody else runs (`--engine-url`): where it is, and whether it answers.

Law: never starts, stops or signals anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from polykv_proxy.engine import probe
from polykv_proxy.engine.output import OutputLog
from polykv_proxy.engine.status import EngineState, EngineStatus, Observer
from polykv_proxy.ports import EngineAddress

_POLL_S = 0.5
_CALM_POLL_S = 5.0


class EngineWatcher:
    """Has the same face as `Supervisor`."""

    def __init__(
        self, address: EngineAddress, *, prefix: str = "", api_key: str | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        self.address = address
        self.output = OutputLog()
        self.observers: list[Observer] = []
        self.status = EngineStatus(EngineState.STOPPED, wall(), supervised=False)
        self._prefix, self._api_key = prefix, api_key
        self._wall = wall
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._look = asyncio.Event()

    def start(self) -> None:
        """Begin to watch."""
        self._set(EngineState.STARTING, None)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine-watcher")

    async def first_boot(self) -> None:
        """Wait until it is ready for the first time, however long that takes."""
        await self._ready.wait()

    def restart(self, reason: str | None = None) -> None:
        """Look again now."""
        del reason  # the engine is not ours
        self._look.set()

    def drain(self) -> None:
        """Say that the end is near."""
        if self.status.state is EngineState.READY:
            self._set(EngineState.DRAINING, None)

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop watching."""
        del at_once  # there is nothing to be polite to
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._set(EngineState.STOPPED, None)

    def kill(self) -> None:
        """Nothing: the engine is not ours."""

    async def _run(self) -> None:
        while True:
            answer = await probe.health(self.address, self._prefix, self._api_key)
            if self.status.state is not EngineState.DRAINING:
                self._judge(answer)
            self._look.clear()
            try:
                async with asyncio.timeout(_CALM_POLL_S if answer == 200 else _POLL_S):
                    await self._look.wait()
            except TimeoutError:
                pass

    def _judge(self, answer: int | None) -> None:
        if answer == 200:
            self._ready.set()
            self._set(EngineState.READY, None)
        elif answer is None:
            self._set(EngineState.FAILED, f"nobody answers at {where(self.address)}")
        else:
            self._set(EngineState.STARTING, f"the engine at {where(self.address)} answers {answer}")

    def _set(self, state: EngineState, reason: str | None) -> None:
        changed = state is not self.status.state
        boots = self.status.boots + (changed and state is EngineState.READY)
        since = self._wall() if changed else self.status.since_ts
        self.status = replace(self.status, state=state, since_ts=since, reason=reason, boots=boots, restarts=max(0, boots - 1))
        if changed:
            for observer in self.observers:
                observer(self.status)


def where(address: EngineAddress) -> str:
    """An address for people."""
    return address.uds or f"{address.host}:{address.port}"
