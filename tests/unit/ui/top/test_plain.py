"""Mirrors ui/top/plain.py: one look, printed."""

import io

from rich.console import Console

from polykv_proxy.ui.top.plain import show
from polykv_proxy.ui.top.snapshot import Snapshot
from tests.unit.ui.top.snapshots import pool, session, snapshot


def printed(found: Snapshot) -> str:
    out = io.StringIO()
    show(found, "http://proxy", Console(file=out, highlight=False))
    return out.getvalue()


def test_a_file_gets_text_without_colour_and_whole_lines() -> None:
    """Head, columns and rows; nothing is cut at some terminal's width."""
    long = "session-" + "x" * 40
    text = printed(snapshot(pool(1, sessions=("a", long)), sessions=(session("a", 9.0, pool_id=1),)))
    assert "\x1b" not in text
    assert long in text
    line = next(line for line in text.splitlines() if "─ a " in line)
    assert line.split() == ["├──", "a", "active", "3", "300", "B", "9.0", "█" * 16, "120", "ms", "40/4,096"]


def test_nothing_is_said_in_words() -> None:
    """No pools is not an empty page."""
    assert "no pools and no sessions" in printed(snapshot())
