"""Starts the engine, knows when it is ready, starts it again when it dies, stops it.

Law: one task owns the process; everyone else reads `status` or asks. Readiness is judged by progress, never by a fixed limit.

    starting --answers 200, listener is ours--> ready --exits--> failed --pause--> starting
    starting --exits, or no sign of life for `idle_s`--> failed
    any --drain--> draining --stop--> stopping --> stopped
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from polykv_proxy.engine import probe
from polykv_proxy.engine.output import OutputLog
from polykv_proxy.engine.process import EngineProcess
from polykv_proxy.engine.status import EngineState, EngineStatus, Observer
from polykv_proxy.errors import EngineError
from polykv_proxy.ports import EngineAddress

_log = logging.getLogger(__name__)
_ANSWERING_FACTOR = 10


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Seconds. `idle_s`: a starting engine that shows no progress for this long is given up."""

    idle_s: float = 60.0
    stop_grace_s: float = 10.0
    backoff_first_s: float = 0.5
    backoff_last_s: float = 30.0
    steady_s: float = 60.0
    """An engine that was ready for this long starts the back-off anew when it dies."""
    poll_s: float = 0.05
    poll_last_s: float = 0.5


class EngineStartError(EngineError):
    """The engine ended by itself before it was ready. `lines` are the last that it printed."""

    def __init__(self, message: str, lines: Sequence[str]) -> None:
        super().__init__(message)
        self.lines = list(lines)


class Supervisor:
    """One supervised engine. `start` once; `first_boot` tells whether it came up; `stop` at the end."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        address: EngineAddress,
        *,
        prefix: str = "",
        api_key: str | None = None,
        output: OutputLog | None = None,
        limits: SupervisorLimits | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.address = address
        self.output = output or OutputLog()
        self.observers: list[Observer] = []
        self._argv, self._env, self._prefix, self._api_key = list(argv), dict(env), prefix, api_key
        self._limits = limits or SupervisorLimits()
        self._wall = wall
        self.status = EngineStatus(EngineState.STOPPED, wall(), supervised=True)
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._again = asyncio.Event()
        self._ending: asyncio.Task[int] | None = None
        self._why: str | None = None
        self._stopping = False
        self._draining = False

    # asked by others

    def start(self) -> None:
        """Begin to supervise."""
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine-supervisor")

    async def first_boot(self) -> None:
        """Wait until the engine is ready for the first time. EngineStartError when it exits before."""
        assert self._first is not None, "start() comes first"
        await asyncio.shield(self._first)

    def restart(self, reason: str | None = None) -> None:
        """Try again now: ends a pause, or the running engine, politely at first. `reason` is then shown as the cause of its end."""
        self._again.set()
        if self._process is not None and self.status.state in (EngineState.READY, EngineState.STARTING):
            self._why = reason
            self._ending = asyncio.get_running_loop().create_task(self._process.stop(self._limits.stop_grace_s))

    def drain(self) -> None:
        """Say that the end is near; the engine goes on working, but is not started again."""
        self._draining = True
        if self.status.state is EngineState.READY:
            self._set(EngineState.DRAINING)

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop for good. `at_once` leaves out the polite signal."""
        self._stopping = True
        self._set(EngineState.STOPPING)
        if self._process is not None:
            await self._process.stop(0.0 if at_once else self._limits.stop_grace_s)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._first is not None and not self._first.done():
            self._first.cancel()
        self._set(EngineState.STOPPED, pid=None)
        self.output.close()

    def kill(self) -> None:
        """End the engine's process group now, without waiting, and for good."""
        self._stopping = True
        self._set(EngineState.STOPPING)
        if self._process is not None:
            self._process.signal_group(signal.SIGKILL)

    # the task

    async def _run(self) -> None:
        failures = 0
        while not self._stopping:
            self._again.clear()
            ready_s = await self._one_life()
            if self._stopping or self._draining:
                return
            failures = 1 if ready_s >= self._limits.steady_s else failures + 1
            await self._pause(min(self._limits.backoff_last_s, self._limits.backoff_first_s * 2 ** (failures - 1)))

    async def _one_life(self) -> float:
        """From spawn to the end of one process; returns the seconds for which it was ready."""
        boots = self.status.boots + 1
        self._set(EngineState.STARTING, boots=boots, restarts=boots - 1, reason=None, exit_code=None, retry_ts=None)
        _remove_socket(self.address)
        try:
            process = self._process = await EngineProcess.start(self._argv, self._env, self.output)
        except OSError as error:
            self._fail(f"the engine cannot be started: {error.strerror}", None, fatal=True)
            return 0.0
        if self._stopping:
            await process.stop(0.0)
            return 0.0
        self.status = replace(self.status, pid=process.pid)
        trouble = await self._until_ready(process)
        by_itself = process.exited.done()
        ready_at = time.monotonic()
        if trouble is None:
            self._set(EngineState.READY, reason=None)
            self._settle_first(None)
        elif not by_itself:
            await process.stop(self._limits.stop_grace_s)
        code = await asyncio.shield(process.exited)
        self._process = None
        if not self._stopping:
            self._fail(trouble or self._why or _epitaph(code), code, fatal=by_itself)
        self._why = None
        return time.monotonic() - ready_at if trouble is None else 0.0

    async def _until_ready(self, process: EngineProcess) -> str | None:
        """None once it is ready; else why it is given up."""
        limits, poll_s = self._limits, self._limits.poll_s
        moved_at = answered_at = time.monotonic()
        handle = _handle(process.pid)
        before = probe.vitals(handle, self.output.n_bytes, moved_at) if handle else None
        while True:
            answer = await self._poll(process)
            if process.exited.done():
                return _epitaph(process.exited.result()) + " before it was ready"
            now = time.monotonic()
            if answer == 200:
                if probe.listener_is_ours(self.address, process):
                    return None
                return "somebody else answers at the engine's address"
            if answer is not None:
                answered_at = now
            vitals = probe.vitals(handle, self.output.n_bytes, now) if handle else None
            if vitals is not None and (before is None or vitals.moved_since(before)):
                moved_at, before = now, vitals
            silent = now - max(moved_at, answered_at) > limits.idle_s
            if silent or now - moved_at > limits.idle_s * _ANSWERING_FACTOR:
                return f"no sign of progress for {now - moved_at:.0f} s (no computing, reading or output): given up"
            await asyncio.wait([process.exited], timeout=poll_s)
            poll_s = min(limits.poll_last_s, poll_s * 1.5)

    async def _poll(self, process: EngineProcess) -> int | None:
        asking = asyncio.ensure_future(probe.health(self.address, self._prefix, self._api_key))
        either: list[asyncio.Future[Any]] = [asking, process.exited]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return asking.result()
        asking.cancel()
        return None

    async def _pause(self, seconds: float) -> None:
        self._set(self.status.state, retry_ts=self._wall() + seconds)
        try:
            async with asyncio.timeout(seconds):
                await self._again.wait()
        except TimeoutError:
            pass

    def _fail(self, reason: str, code: int | None, *, fatal: bool) -> None:
        """`fatal`: if it never was ready, another attempt would most likely end the same way."""
        lines = self.output.tail(20)
        _log.error("engine: %s%s", reason, "".join(f"\n    {line}" for line in lines[-5:]))
        self._set(EngineState.FAILED, reason=reason, exit_code=code, pid=None)
        if fatal and self.status.boots == 1:
            self._settle_first(EngineStartError(reason, lines))

    def _settle_first(self, error: EngineStartError | None) -> None:
        if self._first is None or self._first.done():
            return
        if error is None:
            self._first.set_result(None)
        else:
            self._first.set_exception(error)
            self._first.exception()  # asked for, so nobody has to

    def _set(self, state: EngineState, **changes: object) -> None:
        since = self.status.since_ts if state is self.status.state else self._wall()
        self.status = replace(self.status, state=state, since_ts=since, **changes)  # type: ignore[arg-type]
        for observer in self.observers:
            observer(self.status)


def _remove_socket(address: EngineAddress) -> None:
    """A killed engine leaves its socket behind, and the next one could not bind."""
    if address.uds is not None:
        Path(address.uds).unlink(missing_ok=True)


def _handle(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _epitaph(code: int) -> str:
    if code < 0:
        try:
            return f"the engine was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"the engine was killed by signal {-code}"
    return f"the engine exited with code {code}"
