"""The wheel, installed where there is no checkout: it carries what it needs, runs, is upgraded, and leaves nothing behind.

Law: an environment of its own, a home of its own; the network is never asked (dependencies are those of the environment that runs
the tests). What may remain is what docs/install.md names: the state folder and the cache.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.fakes.async_proxy import free_port
from tests.models import cache_dir, tiny_model

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Installed:
    """An environment and a home; `wheel` is what goes into it."""

    folder: Path
    wheel: Path

    @property
    def environment(self) -> dict[str, str]:
        """As a user has it: nothing of the checkout, nothing of the tests' settings."""
        kept = {"PATH": os.environ["PATH"], "HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp")}
        return {**kept, "POLYKV_CACHE": str(cache_dir().parent), "TERM": "dumb"}

    def pip(self, *arguments: str) -> None:
        """pip of the tests' environment, on this one."""
        python = str(self.folder / "venv/bin/python")
        command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "-q", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    def install(self) -> None:
        self.pip("install", "--no-deps", "--no-index", "--force-reinstall", str(self.wheel))

    def run(self, *arguments: str) -> str:
        """The installed command, from a folder that is no checkout; what it printed."""
        command = [str(self.folder / "venv/bin/polykv-proxy"), *arguments]
        done = subprocess.run(command, cwd=self.folder / "work", env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    @contextmanager
    def serving(self, *options: str) -> Iterator[str]:
        """The proxy and its engine, stopped with 0 in the end; its address."""
        command = [
            str(self.folder / "venv/bin/polykv-proxy"),
            "-m",
            str(tiny_model("full")),
            *options,
            "--",
            "-c",
            "1024",
            "-t",
            "1",
        ]
        process = subprocess.Popen(command, cwd=self.folder / "work", env=self.environment, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                if line.startswith("  try "):
                    break
            found = re.search(r"ready at (http://\S+)", said)
            assert found, said
            yield found[1]
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            process.stderr.close()

    def files(self, below: str) -> set[str]:
        """Everything there is below a folder."""
        return {str(path.relative_to(self.folder / below)) for path in (self.folder / below).rglob("*") if not path.is_dir()}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("install")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("polykv_proxy-*.whl")
    for name in ("home", "tmp", "work"):
        (folder / name).mkdir()
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder / "venv"), "platbase": str(folder / "venv")})
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    made = Installed(folder, wheel)
    made.install()
    return made


def test_it_says_what_it_is(installed: Installed) -> None:
    """`--version` and `--help` from the installed package, not from a checkout."""
    where = [str(installed.folder / "venv/bin/python"), "-c", "import polykv_proxy; print(polykv_proxy.__file__)"]
    assert str(installed.folder) in subprocess.run(where, cwd=installed.folder, capture_output=True, text=True, check=True).stdout
    assert installed.run("--version").startswith("polykv-proxy 0.")
    assert "build-engine" in installed.run("--help")


def test_it_builds_the_same_engine_as_a_checkout(installed: Installed) -> None:
    """The key is that of the checkout: same source, patches, flags and compiler, so one cache serves both."""
    command = [str(ROOT / "scripts/build_engine.sh"), "--print-key"]
    ours = subprocess.run(command, env=installed.environment, capture_output=True, text=True, check=True).stdout
    assert installed.run("build-engine", "--print-key") == ours
    assert installed.run("build-engine", "--print-key", "--cuda") != ours


@pytest.mark.engine
def test_a_life_leaves_nothing_behind(installed: Installed, engine_path: Path) -> None:
    """Build, serve, upgrade, serve with the pools of before, uninstall: what is left is the engine where it was asked for, and the
    state folder.
    """
    before = installed.files("venv")
    installed.run("build-engine", "--output", "llamafile")
    assert installed.files("venv") == before
    assert installed.files("work") == {"llamafile"}
    port = str(free_port())
    with installed.serving("--port", port) as url:
        assert httpx.post(f"{url}/polykv/pools", json={"prompt": "a b c d e f", "name": "kept"}, timeout=60).status_code == 201
    installed.install()
    assert installed.files("venv") == before
    with installed.serving("--port", port) as url:
        assert [pool["name"] for pool in httpx.get(f"{url}/polykv/pools").json()["pools"]] == ["kept"]
    installed.pip("uninstall", "-y", "polykv-proxy")
    left = {name for name in installed.files("venv") if "polykv" in name}
    assert left == set()
    state = f".local/state/polykv/{port}/"
    assert {name for name in installed.files("home") if not name.startswith(state)} == set()
    assert installed.files("tmp") == set()
    assert installed.files("work") == {"llamafile"}
