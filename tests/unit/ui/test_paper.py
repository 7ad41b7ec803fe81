"""Mirrors ui/paper.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from polykv_proxy.ui.paper import endless

LINE = "word " * 60 + "end"


@pytest.mark.parametrize("variable", ["COLUMNS", "FORCE_COLOR"])
def test_a_line_in_a_file_ends_where_it_ends(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment names a width or wants colours, as logs of CI do."""
    monkeypatch.setenv(variable, "80")
    file = tmp_path / "log"
    with file.open("w") as out:
        endless(Console(file=out)).print(LINE)
    assert file.read_text() == LINE + "\n"


def test_a_line_on_a_terminal_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is broken between words."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as out:
        endless(Console(file=out)).print(LINE)
        out.flush()
        shown = os.read(reader, 4096).decode().splitlines()
    os.close(reader)
    assert [len(line) > 80 for line in shown] == [False] * 4
    assert " ".join(map(str.strip, shown)) == LINE
