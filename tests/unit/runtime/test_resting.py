"""Mirrors runtime/resting.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polykv_proxy.core.pace import Pace
from polykv_proxy.core.sessions import Session
from polykv_proxy.core.throughput import Speed
from polykv_proxy.runtime.resting import Resting

SESSION = Session("a", 1, 0.0, 0.0)
SPEED = Speed(Pace(10.0, 1.0))


def look(rows: Resting[object], session: Session = SESSION, speed: Speed | None = SPEED, n_ctx: int | None = 512) -> object:
    """The row that a look gives."""
    rows.begin()
    return rows.row(session, speed, n_ctx, object)


def test_who_rests_has_the_row_of_the_look_before() -> None:
    """It is made once, however many looks."""
    rows = Resting[object]()
    first = look(rows)
    assert all(look(rows) is first for _ in range(3))


@pytest.mark.parametrize(
    "change",
    [
        {"session": replace(SESSION, n_turns=1)},
        {"session": replace(SESSION, pool_id=7)},
        {"session": replace(SESSION)},
        {"speed": replace(SPEED, last_tps=3.0)},
        {"speed": None},
        {"n_ctx": None},
    ],
)
def test_whatever_it_is_made_of_a_change_makes_a_new_one(change: dict) -> None:
    """Another record, another figure, another engine; and the new row stays."""
    rows = Resting[object]()
    first = look(rows)
    second = look(rows, **change)
    assert second is not first
    assert look(rows, **change) is second


def test_who_is_not_looked_at_is_forgotten() -> None:
    """One look without it, because it works or has ended, and nothing of it is kept."""
    rows = Resting[object]()
    first = look(rows)
    rows.begin()
    assert look(rows) is not first
