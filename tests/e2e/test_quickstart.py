"""The tour of scripts/quickstart with a tiny model: figures, ports, and leaving nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.models import ROOT, tiny_model

pytestmark = pytest.mark.engine
HEARS_CTRL_C = ("env", "--default-signal=INT")
"""A shell's background jobs ignore it, and so do their children."""


@pytest.fixture
def command(engine_path: Path) -> list[str]:
    return [
        sys.executable,
        str(ROOT / "scripts/quickstart_tour.py"),
        "--engine",
        str(engine_path),
        "--model",
        str(tiny_model("full")),
    ]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"POLYKV_STATE_DIR": str(tmp_path / "state")}


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@contextlib.contextmanager
def ends(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens within."""
    try:
        yield
    finally:
        process.kill()


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def pools_left(environment: dict[str, str]) -> list[str]:
    """Names of the pools that the next start would find."""
    with contextlib.closing(sqlite3.connect(Path(environment["POLYKV_STATE_DIR"]) / "journal.sqlite")) as journal:
        return [name for (name,) in journal.execute("SELECT name FROM pools")]


def test_once_shows_the_figures_and_ends(command: list[str], environment: dict[str, str], free_port: int) -> None:
    """The second agent takes the whole pool from the cache and computes only its question; run again it does the same."""
    for _ in range(2):
        done = run([*command, "--once", "--port", str(free_port)], environment)
        assert done.returncode == 0, done.stderr
        made = re.search(r"creating the pool +(\d+)", done.stdout)
        pooled = re.search(r"second agent, pool +(\d+) +(\d+) +(\d+)", done.stdout)
        assert made
        assert pooled
        prompt, prefilled, shared = map(int, pooled.groups())
        assert shared == int(made[1])
        assert prefilled == prompt - shared > 0
    assert pools_left(environment) == []


def test_a_taken_port_is_named(command: list[str], environment: dict[str, str], taken_port: int) -> None:
    """A port that was asked for and is taken ends the tour before anything starts."""
    done = run([*command, "--once", "--port", str(taken_port)], environment)
    assert done.returncode == 1
    assert f"port {taken_port} cannot be used; give another one with --port" in done.stderr


def test_a_model_that_does_not_load_is_reported(
    command: list[str], environment: dict[str, str], free_port: int, tmp_path: Path
) -> None:
    """The tour ends with a sentence, not with a traceback, and does not wait for ever."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF nothing")
    done = run([*command[:-1], str(broken), "--once", "--port", str(free_port)], environment)
    assert done.returncode == 1
    assert "[quickstart] FAILED:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_serving_ends_with_all_its_processes(
    command: list[str], environment: dict[str, str], free_port: int, stop: signal.Signals, code: int
) -> None:
    """Ctrl-C in the foreground, and a termination from outside, leave neither proxy nor engine."""
    with (
        subprocess.Popen(
            [*HEARS_CTRL_C, *command, "--port", str(free_port)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as tour,
        ends(tour),
    ):
        assert tour.stdout is not None
        assert any("Serving on" in line for line in tour.stdout)
        family = psutil.Process(tour.pid).children(recursive=True)
        assert len(family) == 2
        if stop == signal.SIGINT:
            os.killpg(tour.pid, stop)
        else:
            tour.send_signal(stop)
        assert tour.wait() == code
    assert pools_left(environment) == []
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert (len(gone), alive) == (2, [])
