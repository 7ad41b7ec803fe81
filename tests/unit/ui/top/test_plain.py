"""Mirrors ui/top/plain.py: one look, printed."""

import io

from rich.console import Console

from polykv_proxy.ui.top.plain import show
from polykv_proxy.ui.top.snapshot import Snapshot
from tests.unit.ui.top.snapshots import pool, savings, session, snapshot


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


def test_savings_and_misses_stand_beside_each_other() -> None:
    """In all, today, and for each pool."""
    spared = savings(2060, 21.4, 5, token_mismatch=1, rebuilt=2)
    text = printed(
        snapshot(pool(1, savings=spared), pool(2, savings=savings(0, 0.0)), pool(3), savings=savings(60, 0.5, 3, lora=1))
    )
    assert "saved 1,234 tokens, about 2 min; today 60 tokens, about 500 ms in 3 requests; missed lora 1\n" in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["p1"] == ["p1", "resident", "30", "1000", "B", "2,060", "21.4", "s", "3"]
    assert (lines["p2"][5:], lines["p3"][5:]) == ([], [])
    assert "today no tokens in 0 requests" in printed(snapshot(savings=savings(0, 0.0, 0)))


def test_nothing_is_said_in_words() -> None:
    """No pools is not an empty page."""
    assert "no pools and no sessions" in printed(snapshot())
