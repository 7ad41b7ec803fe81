"""The other commands: what they say to a bad option, before they do anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["quickstart", "--fast"], "unknown option: --fast"),
        (["quickstart", "--port", "http"], "--port takes a number, not 'http'"),
        (["quickstart", "-m", "/nowhere.gguf"], "there is no model at /nowhere.gguf"),
        (["bench", "../x"], "no bench is called '../x'; scripts/bench --list shows what there is"),
        (["bench", "nothing-like-it"], "no bench is called 'nothing-like-it'"),
        (["check", "--fix"], "unknown option: --fix"),
        (["patches", "undo"], "invalid choice: 'undo'"),
        (["tiny_model", "huge"], "invalid choice: 'huge'"),
        (["e2e", "kills", "everything"], "unknown phase: everything"),
    ],
)
def test_a_bad_option_is_named(command: list[str], said: str) -> None:
    """The answer names what was wrong, and the code is not zero."""
    done = run(*command)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "quickstart",
        "test",
        "check",
        "bench",
        "build_engine.sh",
        "fetch_models.sh",
        "fetch_browser.sh",
        "fetch_charts.sh",
        "check_page",
        "screenshots",
        "patches",
        "tiny_model",
        "e2e",
        "soak",
    ],
)
def test_every_command_has_help(name: str) -> None:
    """--help prints a usage line and does nothing else."""
    done = run(name, "--help")
    assert done.returncode == 0
    assert "usage:" in done.stdout
