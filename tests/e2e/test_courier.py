"""The courier as its README starts it, before a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.product import product
from tests.models import ROOT, tiny_model

pytestmark = pytest.mark.engine


def test_packages_are_delivered_and_reported(engine_path: Path, tmp_path: Path) -> None:
    """Every turn is in the report, and neither sessions nor the pool are left."""
    with product(engine_path, tiny_model("full"), tmp_path, args=("-c", 16384, "-np", 8)) as proxy:
        options = ["--url", proxy.served.url, "--floor", "1", "--packages", "4", "--steps", "2", "--max-tokens", "400"]
        command = [sys.executable, "-m", "examples.courier", *options, "--tools-s", "0.01", "--out", tmp_path / "report"]
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert proxy.get("/polykv/sessions")["sessions"] == []
        assert proxy.get("/polykv/pools")["pools"] == []
    said = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (said["figures"]["delivered"], said["figures"]["failed"]) == (4, 0)
    assert len(said["turns"]) == 8
    assert all(0 < turn["n_answer"] <= 400 for turn in said["turns"])
    assert (tmp_path / "report" / "report.svg").read_text().startswith("<?xml")
