"""Who is overdue while an engine stands still."""

from __future__ import annotations

from polykv_proxy.core.standstill import Standstill


def test_the_limit_runs_from_the_last_movement() -> None:
    """First sight and every change start it anew; the same sight again does not."""
    judge: Standstill[str] = Standstill(10)
    assert judge.waits(["a"], 0)
    judge.saw(1, 1)
    judge.saw(1, 9)
    assert judge.overdue(10) == []
    judge.saw(2, 11)
    assert judge.overdue(20) == []
    assert judge.overdue(21) == ["a"]


def test_an_engine_that_was_never_seen_stands_still() -> None:
    """Without any sight the limit runs from the moment at which somebody began to wait."""
    judge: Standstill[str] = Standstill(10)
    assert not judge.waits([], 0)
    assert judge.still_s(5) is None
    judge.waits(["a"], 5)
    assert judge.overdue(14) == []
    assert judge.overdue(15) == ["a"]
    assert judge.still_s(15) == 10


def test_everyone_has_the_whole_limit() -> None:
    """Who comes late waits for as long as the first."""
    judge: Standstill[str] = Standstill(10)
    judge.waits(["a"], 0)
    judge.waits(["a", "b"], 6)
    assert judge.overdue(10) == ["a"]
    judge.waits(["b"], 11)
    assert judge.overdue(15) == []
    assert judge.overdue(16) == ["b"]


def test_what_was_seen_is_forgotten_when_nobody_waits() -> None:
    """A new wait begins with a new first sight, even of the same."""
    judge: Standstill[str] = Standstill(10)
    judge.waits(["a"], 0)
    judge.saw(1, 0)
    judge.waits([], 5)
    judge.waits(["a"], 100)
    judge.saw(1, 105)
    assert judge.overdue(114) == []
    assert judge.overdue(115) == ["a"]
