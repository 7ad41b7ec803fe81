"""Mirrors core/admission/line.py."""

from __future__ import annotations

from polykv_proxy.core.admission.arms import OK
from polykv_proxy.core.admission.line import Ask, Lines, Waiting


def waiting(req: int, line: int) -> Waiting:
    return Waiting(Ask(req), line, 0.0, 9.0, OK)


def test_lines_take_turns_and_each_is_first_come_first_served() -> None:
    """Who was served goes to the end of the turns, not of its line."""
    lines = Lines()
    for req, line in [(1, 10), (2, 10), (3, 10), (4, 20), (5, 30)]:
        lines.join(waiting(req, line))
    served = []
    while lines.heads():
        head = lines.heads()[0]
        lines.leave(head.ask.req)
        lines.served(head.line)
        served.append(head.ask.req)
    assert served == [1, 4, 5, 2, 3]
    assert (len(lines), list(lines)) == (0, [])


def test_a_position_is_counted_from_one_and_changes_when_those_before_leave() -> None:
    """Also in the middle; somebody who does not wait has none."""
    lines = Lines()
    for req in (1, 2, 3):
        lines.join(waiting(req, 10))
    assert [lines.position(req) for req in (1, 2, 3, 4)] == [1, 2, 3, None]
    assert lines.leave(2) is not None
    assert lines.leave(2) is None
    assert (lines.position(3), lines.length(10)) == (2, 2)
