"""F060: a start is judged by what the process does, not by a clock; a dead child is reported at once; a hung one is given up."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from polykv_proxy.engine.address import RunFolder, private_address
from polykv_proxy.engine.status import EngineState
from polykv_proxy.engine.supervisor import EngineStartError, Supervisor, SupervisorLimits
from tests.lengths import length

FAKE = Path(__file__).parents[1] / "fakes" / "fake_engine_process.py"
SCALE = length(1 / 60, 1.0)


class Rig:
    """A supervisor over the fake engine process in one mode."""

    def __init__(
        self, mode: str, folder: RunFolder, *, unix: bool = True, idle_s: float = 20 * SCALE, scale: float = SCALE
    ) -> None:
        address = private_address(folder, unix_socket=unix)
        where = ["--host", address.uds] if address.uds else ["--host", address.host, "--port", str(address.port)]
        env = {**os.environ, "FAKE_MODE": mode, "FAKE_SCALE": str(scale)}
        limits = SupervisorLimits(
            idle_s=idle_s, stop_grace_s=5, backoff_first_s=0.05, backoff_last_s=0.2, poll_s=0.02, poll_last_s=0.05
        )
        self.states: list[EngineState] = []
        self.changed = asyncio.Event()
        self.supervisor = Supervisor([sys.executable, str(FAKE), *where], env, address, limits=limits)
        self.supervisor.observers.append(self._note)

    def _note(self, status: object) -> None:
        self.states.append(self.supervisor.status.state)
        self.changed.set()

    async def until(self, state: EngineState, *, restarts: int = 0) -> None:
        async with asyncio.timeout(60):
            while self.supervisor.status.state is not state or self.supervisor.status.restarts < restarts:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
def folder(tmp_path: Path):
    run = RunFolder({"XDG_RUNTIME_DIR": str(tmp_path)})
    yield run
    run.close()


@pytest.mark.parametrize("unix", [True, False])
async def test_a_slow_load_is_waited_for(folder: RunFolder, unix: bool) -> None:
    """Refused, then 503 for three times the limit, then ready: it is never given up. The fake's own start is the only margin."""
    rig = Rig("slow", folder, unix=unix, idle_s=length(2.0, 20.0), scale=length(0.1, 1.0))
    rig.supervisor.start()
    await asyncio.wait_for(rig.supervisor.first_boot(), 120)
    assert EngineState.FAILED not in rig.states
    assert rig.supervisor.status.boots == 1
    await rig.supervisor.stop()


async def test_a_child_that_dies_is_reported_with_its_last_words(folder: RunFolder) -> None:
    """Exit code 1 during the start is an error at once, carrying the tail of the output."""
    rig = Rig("exit1", folder, idle_s=60)
    rig.supervisor.start()
    with pytest.raises(EngineStartError, match="exited with code 1") as caught:
        await asyncio.wait_for(rig.supervisor.first_boot(), 30)
    assert "error: this model is broken" in caught.value.lines
    await rig.supervisor.stop()


async def test_a_hung_child_is_given_up_and_a_later_attempt_works(folder: RunFolder) -> None:
    """No computing, no reading, no output: given up after the limit; the next attempt needs no new proxy."""
    rig = Rig("hang", folder, idle_s=1.0)
    rig.supervisor.start()
    await rig.until(EngineState.FAILED)
    assert "no sign of progress" in (rig.supervisor.status.reason or "")
    rig.supervisor._env["FAKE_MODE"] = "ready"
    rig.supervisor.restart()
    await rig.until(EngineState.READY, restarts=1)
    await asyncio.wait_for(rig.supervisor.first_boot(), 10)
    await rig.supervisor.stop()


async def test_a_503_after_ready_is_no_reason_to_restart(folder: RunFolder) -> None:
    """An engine that answers 503 for a while once it was ready keeps its process."""
    rig = Rig("flap", folder)
    rig.supervisor.start()
    await asyncio.wait_for(rig.supervisor.first_boot(), 60)
    pid = rig.supervisor.status.pid
    await asyncio.sleep(15 * SCALE)
    assert rig.supervisor.status.state is EngineState.READY
    assert rig.supervisor.status.pid == pid
    await rig.supervisor.stop()


async def test_a_crash_restarts_and_leaves_no_zombie(folder: RunFolder) -> None:
    """A killed engine is reaped, counted and started again; its number is then free."""
    rig = Rig("ready", folder, idle_s=60)
    rig.supervisor.start()
    await asyncio.wait_for(rig.supervisor.first_boot(), 60)
    pid = rig.supervisor.status.pid
    assert pid is not None
    os.kill(pid, 9)
    await rig.until(EngineState.READY, restarts=1)
    assert EngineState.FAILED in rig.states
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await rig.supervisor.stop()
    assert rig.supervisor.status.state is EngineState.STOPPED


async def test_an_engine_ended_on_purpose_has_not_failed(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    """Killed by a second signal to the proxy: no error is said, and nothing is started again."""
    rig = Rig("ready", folder, idle_s=60)
    rig.supervisor.start()
    await asyncio.wait_for(rig.supervisor.first_boot(), 60)
    rig.supervisor.drain()
    rig.supervisor.kill()
    await rig.supervisor.stop(at_once=True)
    assert EngineState.FAILED not in rig.states
    assert rig.states[-1] is EngineState.STOPPED
    assert caplog.records == []


async def test_a_crash_loop_backs_off(folder: RunFolder) -> None:
    """F062: each death soon after the last one doubles the wait before the next start, up to a bound."""
    rig = Rig("ready", folder, idle_s=60)
    rig.supervisor._wall = lambda: 0.0
    waits: list[float] = []
    rig.supervisor.observers.append(lambda status: waits.append(status.retry_ts) if status.retry_ts is not None else None)
    rig.supervisor.start()
    for n in range(5):
        await rig.until(EngineState.READY, restarts=n)
        pid = rig.supervisor.status.pid
        assert pid is not None
        os.kill(pid, signal.SIGABRT)
        await rig.until(EngineState.FAILED, restarts=n)
    await rig.until(EngineState.READY, restarts=5)
    assert waits == [0.05, 0.1, 0.2, 0.2, 0.2]
    await rig.supervisor.stop()


async def test_a_foreign_listener_is_not_taken_for_the_engine(folder: RunFolder) -> None:
    """Somebody else answering at the address is no ready engine."""
    rig = Rig("hang", folder, unix=False, idle_s=60)

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(stranger, "127.0.0.1", rig.supervisor.address.port)
    rig.supervisor.start()
    await rig.until(EngineState.FAILED)
    assert "somebody else" in (rig.supervisor.status.reason or "")
    await rig.supervisor.stop()
    server.close()
    await server.wait_closed()


async def test_term_comes_before_kill(folder: RunFolder) -> None:
    """An engine that ignores TERM is killed after the grace time, and not before."""
    rig = Rig("stubborn", folder, idle_s=60)
    rig.supervisor._limits = SupervisorLimits(stop_grace_s=0.5)
    rig.supervisor.start()
    await asyncio.wait_for(rig.supervisor.first_boot(), 60)
    began = time.monotonic()
    await rig.supervisor.stop()
    assert time.monotonic() - began >= 0.5
