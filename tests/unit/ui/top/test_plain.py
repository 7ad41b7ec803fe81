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


def test_engines_on_the_device_stand_in_the_head() -> None:
    """Ours first; an engine that shares nothing has no such line."""
    ours = {"name": "a.gguf", "pid": 1, "weight": 2.0, "share_pct": 66.667, "busy_pct": 65.2, "active": True}
    other = {"name": "", "pid": 7, "weight": 0.5, "share_pct": 0.0, "busy_pct": 0.0, "active": False}
    shared = {"enabled": True, "why": None, "gpu_key": "k", "self": ours, "peers": [other]}
    line = "GPU  a.gguf (this one, weight 2, 67 %, busy 65 %) process 7 (weight 0.5, 0 %, busy 0 %)\n"
    assert line in printed(snapshot(gpu=shared))
    assert "GPU" not in printed(snapshot(gpu={**shared, "enabled": False}))


def test_nothing_is_said_in_words() -> None:
    """No pools is not an empty page."""
    assert "no pools and no sessions" in printed(snapshot())


POLICY = {"pool_id": 1, "name": "base", "mode": "enforced", "on_saturation": "queue", "floor_tps": 15.0, "can_admit": False,
    "reason": "projected mean tps below floor", "value": 13.94, "threshold": 15.0, "headroom_sessions": 0, "n_pool_sessions": 4,
    "settling": False, "settle_remaining_ms": 0, "n_queued": 2}  # fmt: skip


def test_admission_is_said_where_there_is_something_to_decide() -> None:
    """Who runs and waits, each floor with its room, the last decision that is news; markup in names is text."""
    waits = {"req": 9, "session_id": "b", "waited_ms": 4200}
    default = {**POLICY, "pool_id": None, "name": None, "mode": "advisory", "settling": True, "settle_remaining_ms": 1800}
    admission = {"policies": [default, POLICY], "queue": [waits], "n_running": 4, "n_queued": 1, "max_running": 8}
    plain = {"arm": "no_policy", "outcome": "admitted", "session_id": "z", "req": 3, "reason": "no admission policy"}
    refused = {**POLICY, "arm": "floor", "outcome": "queue_full", "session_id": "[red]x", "req": 2}
    text = printed(snapshot(admission=admission, decisions={"decisions": [plain, refused]}))
    ground = "projected mean tps below floor (13.9 against 15.0)"
    assert f"admission: 4 of 8 running, 1 waiting (longest 4.2 s); last: [red]x queue full, {ground}\n" in text
    assert f"  base  floor 15.0 tok/s, enforced: queue  4 sessions, 2 waiting, room 0  {ground}\n" in text
    assert "requests without a pool  floor 15.0 tok/s, advisory: would queue" in text
    assert "settling, 1.8 s at most" in text
    many = printed(snapshot(admission={**admission, "policies": [POLICY] * 7, "max_running": None}, decisions={}))
    assert (many.count("  base  "), "and 3 policies more" in many, "4 running" in many) == (4, True, True)
    assert "admission" not in printed(snapshot(admission={"policies": [], "queue": [], "max_running": None}))
