"""What becomes of tasks, counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polykv_proxy.core.books import Book, Brought
from polykv_proxy.core.events import SlotEvent, SlotEventKind
from polykv_proxy.core.turn_tally import NotShared, Reason, TurnTally, why_not_shared
from polykv_proxy.core.turns import turn_of

OVER = SlotEvent(
    SlotEventKind.RELEASED, 7, 0, 0, None, task=3, slot=0, n_prompt=100, n_cached=60, n_shared=40, n_decoded=5,
    reason="stop", us_queued=2000, us_prompt=50_000, us_decode=400_000,
)  # fmt: skip
BOOK = Book(7, 1, 0.0, pool_id=1)


def count(*events: SlotEvent) -> TurnTally:
    tally = TurnTally()
    for event in events:
        tally.released(event, turn_of(event), BOOK)
    return tally


def test_a_turn_is_measured_once_and_its_gaps_as_often_as_it_had_them() -> None:
    """Times go into the histograms in seconds; four gaps of 0.1 s make 0.4 s."""
    tally = count(OVER)
    assert (tally.n_prompt, tally.n_cached, tally.n_shared) == (100, 60, 40)
    assert (tally.queue_s.sum, tally.ttft_s.sum, tally.tpot_s.sum) == pytest.approx((0.002, 0.052, 0.1))
    assert (tally.gaps_s.count, tally.gaps_s.sum) == (4, pytest.approx(0.4))
    assert tally.ended == {Reason.STOP: 1}


def test_a_prompt_that_was_not_computed_to_its_end_saved_nothing() -> None:
    """A task cancelled in its prefill counts as ended, and adds no tokens and no time to a first token."""
    tally = count(replace(OVER, reason="cancelled", us_prompt=0, us_decode=0, n_decoded=0))
    assert tally.ended == {Reason.CANCELLED: 1}
    assert (tally.n_prompt, tally.n_cached, tally.n_shared, tally.ttft_s.count, tally.not_shared.total()) == (0, 0, 0, 0, 0)


def test_seconds_that_were_saved_go_with_the_tokens() -> None:
    """Only of a turn that shared something; how many they are is said by savings.py."""
    tally = TurnTally()
    for event in (OVER, replace(OVER, n_cached=0, n_shared=0, miss="too_short")):
        tally.released(event, turn_of(event), BOOK, 0.5)
    assert (tally.n_shared, tally.saved_s) == (40, 0.5)


def test_hits_never_exceed_lookups() -> None:
    """Cached tokens are at most those of the prompts, and shared ones at most the cached (F024)."""
    tally = count(OVER, replace(OVER, n_cached=100, n_shared=100), replace(OVER, n_cached=0, n_shared=0, miss="too_short"))
    assert tally.n_shared <= tally.n_cached <= tally.n_prompt


@pytest.mark.parametrize(
    ("event", "book", "why"),
    [
        (OVER, BOOK, None),
        (OVER, replace(BOOK, brought=Brought.REBUILT), NotShared.REBUILT),
        (OVER, replace(BOOK, brought=Brought.RESTORED), None),
        (replace(OVER, req=0, n_shared=0), None, NotShared.NO_POOL),
        (replace(OVER, n_shared=0), replace(BOOK, pool_id=None), NotShared.NO_POOL),
        (replace(OVER, n_shared=0), replace(BOOK, pool_id=None, miss="stale_seq"), NotShared.STALE_SEQ),
        (replace(OVER, n_shared=0), replace(BOOK, miss="no_seq_ids"), NotShared.NO_SEQ_IDS),
        (replace(OVER, n_shared=0, miss="token_mismatch"), BOOK, NotShared.TOKEN_MISMATCH),
        (replace(OVER, n_shared=0, miss="something new"), BOOK, NotShared.OTHER),
        (replace(OVER, n_shared=0), BOOK, NotShared.OTHER),
        (replace(OVER, n_shared=0, miss="too_short"), None, NotShared.TOO_SHORT),
    ],
)
def test_every_zero_has_its_reason(event: SlotEvent, book: Book | None, why: NotShared | None) -> None:
    """Rebuilt first, then shared, no pool, what the proxy knew, what the engine said; unknown words are `other` (F024)."""
    assert why_not_shared(event, book) is why


def test_no_word_of_the_engine_makes_a_new_label() -> None:
    """Reasons come from a fixed set (F068)."""
    tally = count(*(replace(OVER, reason=f"r{n}", n_shared=0, miss=f"m{n}") for n in range(1000)))
    assert tally.ended == {Reason.OTHER: 1000}
    assert tally.not_shared == {NotShared.OTHER: 1000}
