"""Mirrors core/sessions.py."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.sessions import SessionLedger, valid_session_id


@pytest.mark.parametrize("text", ["a", "x" * 128, "two words"])
def test_session_ids_are_printable_ascii(text: str) -> None:
    """1 to 128 printable ASCII characters."""
    assert valid_session_id(text)


@pytest.mark.parametrize("text", ["", "x" * 129, "tab\t", "\u00e4"])
def test_other_session_ids_are_not(text: str) -> None:
    """Nothing else."""
    assert not valid_session_id(text)


def test_a_number_is_never_used_again() -> None:
    """A name that ended and came back gets a new number."""
    ledger = SessionLedger(10)
    first = ledger.open("a", 0)
    assert ledger.open("a", 1).number == first.number == 10
    ledger.end("a")
    assert ledger.open("a", 2).number == 11
    assert ledger.by_number(10) is None


def test_an_ended_session_stays_ended() -> None:
    """Putting the record of an ended session back does nothing."""
    ledger = SessionLedger()
    session = ledger.open("a", 0)
    ledger.end("a")
    ledger.put(session)
    assert len(ledger) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, 1, 2, "end"]))))
def test_each_pool_knows_its_sessions(moves: list[tuple[str, int | str | None]]) -> None:
    """However sessions open, move and end, a pool has those whose record says so, and no other."""
    ledger = SessionLedger()
    for session_id, to in moves:
        if to == "end":
            ledger.end(session_id)
        else:
            ledger.put(replace(ledger.open(session_id, 0), pool_id=to))
        for pool_id in (1, 2, 3):
            assert sorted(s.session_id for s in ledger.of_pool(pool_id)) == sorted(
                s.session_id for s in ledger if s.pool_id == pool_id
            )


def test_only_idle_sessions_expire() -> None:
    """A session with an open request outlives its TTL."""
    ledger = SessionLedger()
    idle, busy = ledger.open("idle", 0), ledger.open("busy", 0)
    ledger.put(replace(busy, n_streams=1))
    assert ledger.expired(600, 600.0) == [idle]
    assert ledger.expired(599, 600.0) == []
