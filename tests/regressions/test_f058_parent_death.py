"""F058: the engine never outlives the proxy, however that ends, and nothing but our own process group is ever signalled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from polykv_proxy.engine.output import OutputLog
from polykv_proxy.engine.process import EngineProcess

FAKE = Path(__file__).parents[1] / "fakes" / "fake_engine_process.py"
HOLDER = """
import asyncio, os, sys
from polykv_proxy.engine.output import OutputLog
from polykv_proxy.engine.process import EngineProcess
async def main():
    process = await EngineProcess.start(sys.argv[1:], os.environ, OutputLog())
    print(process.pid, flush=True)
    await process.exited
asyncio.run(main())
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")


def _gone(pid: int, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("mode", ["ready", "slow", "hang"])
def test_a_killed_proxy_takes_the_engine_along(mode: str, tmp_path: Path) -> None:
    """kill -9 of the parent, while serving or loading, ends the engine."""
    argv = [sys.executable, str(FAKE), "--host", str(tmp_path / "e.sock")]
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, *argv], stdout=subprocess.PIPE, env={**os.environ, "FAKE_MODE": mode}
    ) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        assert psutil.pid_exists(pid)
        holder.kill()
        holder.wait()
        assert _gone(pid)


@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.05, 0.1])
def test_a_parent_killed_right_after_the_spawn_leaves_nothing(wait_s: float, tmp_path: Path) -> None:
    """Death in the gap between spawn and exec is noticed too: no process with our argument is left."""
    mark = str(tmp_path / "e.sock")
    argv = [sys.executable, str(FAKE), "--host", mark]
    with subprocess.Popen([sys.executable, "-c", HOLDER, *argv], stdout=subprocess.PIPE, env=dict(os.environ)) as holder:
        end = time.monotonic() + 20
        while not psutil.Process(holder.pid).children() and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(wait_s)
        pids = [child.pid for child in psutil.Process(holder.pid).children(recursive=True)]
        holder.kill()
        holder.wait()
        assert pids
        assert all(_gone(pid) for pid in pids)


def test_the_engine_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    """Started from a worker thread that then ends, the engine goes on."""
    found: list[int] = []

    async def start() -> None:
        env = {**os.environ, "FAKE_MODE": "ready"}
        process = await EngineProcess.start([sys.executable, str(FAKE), "--host", str(tmp_path / "e.sock")], env, OutputLog())
        found.append(process.pid)

    worker = threading.Thread(target=lambda: asyncio.run(start()))
    worker.start()
    worker.join()
    process = psutil.Process(found[0])
    with pytest.raises(psutil.TimeoutExpired):
        process.wait(1.0)
    os.killpg(found[0], signal.SIGKILL)
    assert _gone(found[0])


async def test_a_stop_signals_our_group_only(tmp_path: Path) -> None:
    """A sibling and an unrelated child of ours survive a stop; the engine's own child does not."""
    bystander = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    child_file = tmp_path / "child"
    env = {**os.environ, "FAKE_MODE": "children", "FAKE_CHILD_FILE": str(child_file)}
    socket = tmp_path / "e.sock"
    process = await EngineProcess.start([sys.executable, str(FAKE), "--host", str(socket)], env, OutputLog())
    async with asyncio.timeout(20):
        while not socket.exists():
            await asyncio.sleep(0.02)
    code = await process.stop(5.0)
    assert code == -signal.SIGTERM
    assert _gone(int(child_file.read_text()))
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


async def test_a_program_that_cannot_run_says_why() -> None:
    """An engine file that is no program ends with its reason in the output."""
    output = OutputLog()
    process = await EngineProcess.start(["/nonexistent/engine"], os.environ, output)
    assert await process.exited == 127
    assert "cannot run /nonexistent/engine: No such file or directory" in output.tail()
