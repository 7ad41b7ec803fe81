"""One engine process: spawned, listened to, signalled as a group, reaped.

Law: a thread of its own spawns it and waits for it, so the kernel's parent-death link holds exactly as long as the proxy lives.
Only the process group that we made is ever signalled, and only while its leader is ours (running, or dead and not yet reaped).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from polykv_proxy.engine.output import OutputLog

_SHIM = Path(__file__).with_name("death_shim.py")
_DRAIN_S = 0.5


class EngineProcess:
    """A started engine. Make it with `EngineProcess.start`; `exited` is done with the return code when it is gone."""

    def __init__(self, output: OutputLog) -> None:
        self.pid = 0
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._output = output
        self._lock = threading.Lock()
        self._alive = False

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str], output: OutputLog) -> EngineProcess:
        """Spawn `argv`. Raises OSError when the process cannot be made at all."""
        process = cls(output)
        started: asyncio.Future[None] = process._loop.create_future()
        threading.Thread(target=process._live, args=(argv, env, started), name="polykv-engine", daemon=True).start()
        await started
        return process

    def signal_group(self, signum: int) -> None:
        """Signal the engine and its children; nothing when it is gone."""
        with self._lock:
            if self._alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signum)

    async def stop(self, grace_s: float) -> int:
        """TERM, then KILL after the grace time. Returns the exit code; the process is reaped."""
        self.signal_group(signal.SIGTERM)
        try:
            return await asyncio.wait_for(asyncio.shield(self.exited), grace_s)
        except TimeoutError:
            self.signal_group(signal.SIGKILL)
            return await asyncio.shield(self.exited)

    def owns(self, pid: int) -> bool:
        """Is this process the engine, or in its group?"""
        try:
            return pid == self.pid or os.getpgid(pid) == self.pid
        except ProcessLookupError:
            return False

    # the thread

    def _live(self, argv: Sequence[str], env: Mapping[str, str], started: asyncio.Future[None]) -> None:
        command = [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), *argv]
        try:
            child = subprocess.Popen(  # noqa: S603 - the user's own engine
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(env),
                process_group=0,
                umask=0o077,  # its socket, and every file that it writes, hold what people asked it
            )
        except OSError as error:
            self._tell(started.set_exception, error)
            return
        self.pid, self._alive = child.pid, True
        assert child.stdout is not None
        reader = threading.Thread(target=self._read, args=(child.stdout.fileno(),), name="polykv-engine-output", daemon=True)
        reader.start()
        self._tell(started.set_result, None)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it left behind; the dead leader still holds the group's number
            code = child.wait()
            self._alive = False
        reader.join(_DRAIN_S)
        if not reader.is_alive():
            child.stdout.close()
        self._tell(self.exited.set_result, code)

    def _read(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(fd, 65536):
                self._output.feed(data)

    def _tell(self, call: object, value: object) -> None:
        def run() -> None:
            with contextlib.suppress(asyncio.InvalidStateError):
                call(value)  # type: ignore[operator]

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(run)
