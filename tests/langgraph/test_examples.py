"""The examples run as they are, against the real proxy with a tiny model, and leave nothing behind."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opencoti_langgraph import PoolClient
from tests.langgraph.real import served_tiny

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, engine_path: Path) -> Iterator[str]:
    with served_tiny(engine_path, tmp_path_factory.mktemp("examples"), n_ctx=8192) as served:
        yield served.url


@pytest.mark.parametrize(
    ("name", "shows"),
    [
        ("fan_out", "8 of 8 done"),
        ("nested", "the task's pool shares"),
        ("toolsets", "prompts part after"),
        ("compaction", "pressure now"),
    ],
)
def test_an_example_runs_and_shows_what_was_saved(
    url: str, name: str, shows: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints what it is about, that prompt tokens were spared, and the speed; pools and sessions are gone afterwards."""
    options = ["--url", url, "--max-tokens", "6"]
    if name == "fan_out":  # as anybody would start it; the others without waiting for another interpreter
        command = [sys.executable, "-m", f"opencoti_langgraph.examples.{name}", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said = done.stdout
    else:
        monkeypatch.setattr(sys, "argv", [name, *options])
        importlib.import_module(f"opencoti_langgraph.examples.{name}").main()
        said = capsys.readouterr().out
    assert shows in said
    found = re.search(r"(\d+) prompt tokens, prefill saved: (\d+) tokens, mean tps: [\d.]+$", said, re.MULTILINE)
    assert found, said
    assert int(found[2]) > int(found[1]) / 2
    with PoolClient(url) as client:
        assert client.pools().pools == []
        assert [one for one in client.sessions().sessions if one.pool_id is not None] == []
