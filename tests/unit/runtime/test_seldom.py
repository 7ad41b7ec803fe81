"""Mirrors runtime/seldom.py."""

from __future__ import annotations

import logging

import pytest

from polykv_proxy.runtime.seldom import EVERY_S, FORGOTTEN_S, Seldom


def test_one_line_a_minute_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    """The first at once; the next tells how many were not said between."""
    now = [0.0]
    seldom = Seldom(logging.getLogger("polykv.test"), lambda: now[0])
    for n in range(4):
        seldom.warning("full", f"no room {n}")
    seldom.warning("broken", "it broke")
    now[0] = EVERY_S
    for n in range(4, 6):
        seldom.warning("full", f"no room {n}")
    now[0] = 2 * EVERY_S
    seldom.warning("broken", "it broke again")
    assert caplog.messages == ["no room 0", "it broke", "no room 4 (3 more like it before)", "it broke again"]


def test_kinds_of_long_ago_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """Their counts too: what a line tells of was not long before it."""
    now = [0.0]
    seldom = Seldom(logging.getLogger("polykv.test"), lambda: now[0])
    for _ in range(2):
        seldom.warning("a", "a")
    now[0] = FORGOTTEN_S
    seldom.warning("b", "b")
    seldom.warning("a", "a")
    assert caplog.messages == ["a", "b", "a"]
