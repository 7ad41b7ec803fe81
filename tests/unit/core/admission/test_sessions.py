"""Mirrors core/admission/sessions.py."""

from __future__ import annotations

from polykv_proxy.core.admission.sessions import Attachments, Departed, Turnover


def test_a_session_that_nobody_confirmed_goes_with_its_last_request() -> None:
    """A failed first request leaves nothing behind."""
    made = Attachments()
    made.begin("a", 1, 5)
    made.begin("a", 2, 5)
    assert (made.known("a"), made.per_pool()[5]) == (True, 1)
    assert made.closed("a", 1, 0) is None
    assert made.closed("a", 2, 0) == Departed(5)
    assert made.closed("a", 2, 0) is None
    assert (len(made), made.per_pool()[5]) == (0, 0)


def test_a_confirmed_session_stays_until_it_ends_and_may_move() -> None:
    """It is counted where it is, once."""
    made = Attachments()
    made.begin("a", 1, 5)
    made.confirm("a", 5)
    assert made.closed("a", 1, 0) is None
    made.confirm("a", 6)
    assert (made.per_pool()[5], made.per_pool()[6]) == (0, 1)
    assert made.end("a") == Departed(6)
    assert made.end("a") is None
    assert not made.known("a")


def test_a_session_between_turns_is_paused_until_it_goes_on_or_ends() -> None:
    """Not before its first request, and not for ever."""
    made = Attachments()
    for session in "abc":
        made.confirm(session, 5)
    assert made.paused(0) == 0
    for req, session in enumerate("abc"):
        made.begin(session, req, 5)
        made.closed(session, req, 10 + req)
    assert made.paused(0) == 3
    made.begin("a", 9, 5)
    made.end("b")
    assert made.paused(0) == 1
    assert made.paused(12.5) == 0
    made.closed("a", 9, 20)
    assert made.paused(20) == 1


def test_an_unnamed_request_is_its_own_session() -> None:
    """And never a known one."""
    made = Attachments()
    made.begin(None, 1, None)
    assert (made.known(None), made.per_pool()[None]) == (False, 1)
    assert made.closed(None, 1, 0) == Departed(None)


def test_the_wait_for_room_is_learned_from_departures() -> None:
    """Less as time goes by, and longer again when nobody leaves."""
    made = Turnover()
    assert made.wait_s(0) is None
    made.left(0)
    assert made.wait_s(1) is None
    made.left(10)
    assert made.wait_s(10) == 10
    assert made.wait_s(14) == 6
    assert made.wait_s(14, n_before=2) == 26
    assert made.wait_s(25) == 15
