"""A state folder on a disk that is full, or read-only, before the start or under a running proxy: no promise is given, service goes
on, nothing is lost. The disk is a small file system of its own, where the tests may mount one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polykv_proxy.engine.output import OutputLog
from polykv_proxy.engine.process import EngineProcess
from polykv_proxy.errors import SettingsError
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, rig, served

SYSTEM = "a careful agent with a long memory"
ASK = {"prompt": SYSTEM + " now", "n_predict": 2, "pool_id": "kept"}
SIZE = "1m"


def mount(*words: str | Path) -> bool:
    try:
        return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


class Disk:
    """A small one, and the state folder on it."""

    def __init__(self, root: Path) -> None:
        self.root, self.state, self._filler = root, root / "state", root / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 512):
                    pass
            except OSError:
                return

    def empty(self) -> None:
        self._filler.unlink()

    def read_only(self, yes: bool) -> None:
        assert mount("-o", f"remount,{'ro' if yes else 'rw'}", self.root)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    root = tmp_path / "disk"
    root.mkdir()
    if os.geteuid() != 0 or not mount("-t", "tmpfs", "-o", f"size={SIZE}", "none", root):
        pytest.skip("nothing may be mounted here")
    try:
        yield Disk(root)
    finally:
        subprocess.run(["umount", "-l", root], check=True)


async def refuses_promises_and_serves(proxy: Rig) -> None:
    """Create, fork, pin and release say 507 and change nothing; the pool that is there is used as before."""
    post = proxy.api.post
    refused = [
        await post("/polykv/pools", json={"prompt": "another one", "name": "another"}),
        await post("/polykv/pools/kept/fork", json={"prompt": SYSTEM + " and more"}),
        await post("/polykv/pools/kept/pin", json={"owner": "me"}),
        await proxy.api.delete("/polykv/pools/kept"),
    ]
    assert [(reply.status_code, reply.json()["error"]["code"]) for reply in refused] == [(507, "journal_failed")] * 4
    await proxy.runtime.sweep()
    reply = await proxy.call("/completion", {**ASK, "session_id": "s"})
    assert (reply.status_code, int(reply.headers["x-cached-prefix-tokens"]) > 0) == (200, True)
    assert (await proxy.api.delete("/polykv/sessions/s")).status_code == 200
    assert (await proxy.call("/completion", {"prompt": "no pool", "n_predict": 1})).status_code == 200
    (pool,) = (await proxy.api.get("/polykv/pools")).json()["pools"]
    assert (pool["name"], pool["residency"], pool["pinned"], len(proxy.engine.seqs)) == ("kept", "resident", False, 1)


async def has_all_of_it(tmp_path: Path, disk: Disk, engine: FakeEngine) -> None:
    """A proxy on this folder has the pool and makes others."""
    async with served(engine, tmp_path) as server, rig(tmp_path, server=server, state_dir=disk.state) as proxy:
        assert int((await proxy.call("/completion", ASK)).headers["x-cached-prefix-tokens"]) > 0
        assert (await proxy.pool(prompt="another one"))["pool_id"] > 1


async def test_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    """Refused while it is full, good again when it is not; stopped and started while full, nothing is lost."""
    engine = FakeEngine()
    async with served(engine, tmp_path) as server, rig(tmp_path, server=server, state_dir=disk.state) as proxy:
        await proxy.pool(prompt=SYSTEM, name="kept")
        disk.fill()
        await refuses_promises_and_serves(proxy)
        disk.empty()
        assert (await proxy.api.post("/polykv/pools", json={"prompt": "a third"})).status_code == 201
        disk.fill()
    with pytest.raises(SettingsError, match="full"):
        async with served(engine, tmp_path) as server, rig(tmp_path, server=server, state_dir=disk.state):
            pass
    disk.empty()
    await has_all_of_it(tmp_path, disk, engine)


async def test_a_journal_that_becomes_read_only(tmp_path: Path) -> None:
    """As a file system does that found an error in itself: no system lets go of one by order while files of it are open."""
    engine, state = FakeEngine(), tmp_path / "state"
    async with served(engine, tmp_path) as server:
        async with rig(tmp_path, server=server, state_dir=state) as proxy:
            await proxy.pool(prompt=SYSTEM, name="kept")
            await proxy.runtime.hub.journal.read(lambda db: db.execute("PRAGMA query_only = 1"))
            await refuses_promises_and_serves(proxy)
        async with rig(tmp_path, server=server, state_dir=state) as proxy:
            assert int((await proxy.call("/completion", ASK)).headers["x-cached-prefix-tokens"]) > 0


async def test_a_disk_that_is_read_only_at_the_start(tmp_path: Path, disk: Disk) -> None:
    """Refused with what to do; writable again, all is there."""
    engine = FakeEngine()
    async with served(engine, tmp_path) as server, rig(tmp_path, server=server, state_dir=disk.state) as proxy:
        await proxy.pool(prompt=SYSTEM, name="kept")
    disk.read_only(True)
    with pytest.raises(SettingsError, match="--state-dir"):
        async with served(engine, tmp_path) as server, rig(tmp_path, server=server, state_dir=disk.state):
            pass
    disk.read_only(False)
    await has_all_of_it(tmp_path, disk, engine)


@pytest.mark.parametrize("full_at_first", [False, True])
async def test_a_full_disk_under_the_engine_s_log(
    disk: Disk, full_at_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine prints more than a pipe holds: it is read to its end, and the gap is said once. With room the log goes on."""
    output = OutputLog(file=disk.root / "engine.log")
    if full_at_first:
        disk.fill()
    go_on = tmp_path / "go on"
    prints = "for _ in range(20000): print('a line of the engine, of some length, as engines print them')"
    waits = "import pathlib, sys, time\nsys.stdout.flush()\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"
    script = f"{prints}\n{waits}\nprint('the end')"
    process = await EngineProcess.start([sys.executable, "-c", script, str(go_on)], os.environ, output)
    async with asyncio.timeout(60):
        while output.n_bytes < 20000 * 60:
            await asyncio.sleep(0.01)
    if full_at_first:
        disk.empty()
    go_on.touch()
    assert await asyncio.wait_for(process.exited, 60) == 0
    assert output.tail(1) == ["the end"]
    output.close()
    assert len([one for one in caplog.records if "there will be a gap" in one.getMessage()]) == 1
    assert (disk.root / "engine.log").read_bytes().endswith(b"the end\n") is full_at_first
