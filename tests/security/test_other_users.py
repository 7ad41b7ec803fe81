"""Another user of this machine reaches neither the engine nor anything that is kept of what people asked."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from polykv_proxy.engine.output import OutputLog
from polykv_proxy.engine.process import EngineProcess
from polykv_proxy.runtime.state_folder import StateFolder
from tests.fakes import fake_engine_process
from tests.fakes.fake_engine_program import WithFakeEngine

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as somebody else")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter: what is closed is closed by itself."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def _as_nobody(attempt: Callable[[], object]) -> bool:
    """Does it work for another user? Tried in a child."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            attempt()
            os._exit(0)
        except OSError:
            os._exit(1)
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in {0, 1}
    return code == 0


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


@as_root
@pytest.mark.parametrize("umask", [0, 0o022])
def test_another_user_gets_in_nowhere(umask: int, open_folder: Path) -> None:
    """The engine's socket, the state folder, the journal, the engine's log: all shut, whatever the umask."""
    log = open_folder / "engine.log"
    options = ("--engine-log", str(log), "--kv-disk-bytes", "1MiB")
    with WithFakeEngine.running(open_folder, *options, variables={"TMPDIR": str(open_folder)}, umask=umask) as served:
        made = httpx.post(served.url + "/polykv/pools", json={"prompt": "a b c"}, trust_env=False)
        assert made.status_code == 201
        state = open_folder / "state"
        files = [path for path in state.rglob("*") if path.is_file()]
        assert {"journal.sqlite", "lock"} <= {path.name for path in files}
        _connect(served.socket)
        assert not _as_nobody(lambda: _connect(served.socket))
        for path in (*files, log):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            assert not _as_nobody(path.read_bytes)
        for folder in (state, Path(served.socket).parent):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert not _as_nobody(lambda folder=folder: list(folder.iterdir()))
            assert not _as_nobody((folder / "planted").touch)
        assert served.stop() == 0


async def test_what_the_engine_makes_is_its_owner_s_alone(tmp_path: Path) -> None:
    """Its socket, and files that it writes, whatever umask the proxy has."""
    path = tmp_path / "e.sock"
    before = os.umask(0)
    try:
        argv = [sys.executable, fake_engine_process.__file__, "--host", str(path)]
        process = await EngineProcess.start(argv, {"FAKE_PID_FILE": str(tmp_path / "pid")}, OutputLog())
    finally:
        os.umask(before)
    async with asyncio.timeout(30):
        while not path.exists():
            await asyncio.sleep(0.01)
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE((tmp_path / "pid").stat().st_mode) == 0o600
    await process.stop(5)


def test_folders_above_are_private_too(tmp_path: Path) -> None:
    """Who could write the parent could put a folder of his own in the place of ours."""
    before = os.umask(0)
    try:
        StateFolder(tmp_path / "a" / "b" / "8080").close()
    finally:
        os.umask(before)
    assert {
        stat.S_IMODE(folder.stat().st_mode) for folder in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "8080")
    } == {0o700}


def test_a_log_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    """It is its owner's to open; a new one is shut."""
    theirs = tmp_path / "theirs"
    theirs.write_text("before\n")
    theirs.chmod(0o644)
    for path, mode in ((theirs, 0o644), (tmp_path / "new", 0o600)):
        output = OutputLog(file=path)
        output.feed(b"said\n")
        output.close()
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert theirs.read_text() == "before\nsaid\n"
