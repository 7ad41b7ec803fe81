"""Every bench runs, and says what it found in the form that others read."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
EXACT = {
    "attach": set(),
    "fanout": {"cells_used", "cells_of_slots_and_pool", "prefilled_tokens"},
    "langgraph": {"prefix_once_and_suffixes"},
    "offpath": {"identical_off", "identical_unused_plain_attention", "same_answer_tiny"},
}
"""Goals that no load of the machine can change."""


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "bench").glob("[!_]*.py")))
def test_a_quick_run_ends_with_its_json_line(name: str, engine_path: Path, twin_path: Path) -> None:
    """The last line is one flat JSON object, `ok` is that every goal is met, and goals that are counts or bytes are met."""
    command: list[str | Path] = [sys.executable, "-m", f"bench.{name}", "--quick", "--engine", engine_path, "--twin", twin_path]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(said) == {"bench", "metrics", "goals", "ok"}
    assert said["bench"] == name
    assert said["metrics"]
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in said["metrics"].values())
    assert all(set(goal) == {"goal", "measured", "met"} for goal in said["goals"].values())
    assert said["ok"] is all(goal["met"] for goal in said["goals"].values())
    assert {goal: said["goals"][goal]["met"] for goal in EXACT.get(name, ())} == dict.fromkeys(EXACT.get(name, ()), True)


def test_benches_are_listed_with_what_they_measure() -> None:
    """`scripts/bench --list` has a line for each bench."""
    done = subprocess.run(
        [ROOT / "scripts" / "bench", "--list"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert set(lines) == {path.stem for path in (ROOT / "bench").glob("[!_]*.py")}
