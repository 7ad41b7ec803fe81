"""Mirrors core/savings.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.books import Book, Brought
from polykv_proxy.core.events import SlotEvent, SlotEventKind
from polykv_proxy.core.savings import HIT, REBUILT, Amount, Savings, Where, summed

DAY = "2023-11-14"
NOW = 1_700_000_000.0


def released(n_prompt: int = 110, n_shared: int = 0, us_prompt: int = 1_000_000, miss: str | None = None) -> SlotEvent:
    counts = {"n_prompt": n_prompt, "n_cached": n_shared, "n_shared": n_shared, "us_prompt": us_prompt}
    return SlotEvent(SlotEventKind.RELEASED, 1, 0, 0, None, miss=miss, **counts)  # type: ignore[arg-type]


def book(**more: object) -> Book:
    return Book(1, 1, 0.0, 7, **more)  # type: ignore[arg-type]


def measured() -> Savings:
    """Prompts are computed at a hundred tokens a second."""
    made = Savings()
    made.note(released(n_prompt=100), None, NOW)
    return made


def test_a_hit_spares_its_tokens_and_the_time_that_they_would_have_taken() -> None:
    """By what computing a token costs."""
    assert measured().note(released(n_shared=100), book(), NOW) == (Where(DAY, 7, HIT), Amount(1, 100, pytest.approx(1.0)))


def test_before_any_prompt_was_measured_time_is_unknown() -> None:
    """Tokens count, seconds do not."""
    assert Savings().note(released(n_shared=100, us_prompt=9), book(), NOW) == (Where(DAY, 7, HIT), Amount(1, 100, 0.0))


@pytest.mark.parametrize(
    ("event", "its_book", "outcome", "amount"),
    [
        (released(miss="token_mismatch"), book(), "token_mismatch", Amount(1, 110, 1.0)),
        (released(), book(miss="no_seq_ids"), "no_seq_ids", Amount(1, 110, 1.0)),
        (released(n_shared=100), book(brought=Brought.REBUILT), REBUILT, Amount(1, 100, pytest.approx(1.0))),
    ],
)
def test_what_was_not_spared_has_its_reason(event: SlotEvent, its_book: Book, outcome: str, amount: Amount) -> None:
    """The engine's reason, or ours, or that the pool was made again for it; with the time of its computing."""
    assert measured().note(event, its_book, NOW) == (Where(DAY, 7, outcome), amount)


def test_a_miss_never_took_longer_than_it_did() -> None:
    """A prompt too short to tell its cost, after dearer ones: its own time counts."""
    missed = released(n_prompt=10, us_prompt=20_000, miss="too_short")
    assert measured().note(missed, book(), NOW) == (Where(DAY, 7, "too_short"), Amount(1, 10, 0.02))


def test_waits_are_in_no_amount() -> None:
    """Of a miss under load the computing counts."""
    missed = released(n_prompt=200, us_prompt=600_000_000, miss="lora")
    assert measured().note(missed, book(), NOW) == (Where(DAY, 7, "lora"), Amount(1, 200, pytest.approx(2.0)))


def test_who_named_no_pool_or_left_too_early_counts_nowhere() -> None:
    """No outcome: nothing is added."""
    savings = measured()
    assert savings.note(replace(released(n_shared=100), kind=SlotEventKind.FINISHED), book(), NOW) is None
    assert savings.note(released(n_shared=100), Book(1, 1, 0.0), NOW) is None
    assert savings.note(released(n_shared=100), None, NOW) is None
    assert savings.note(released(n_shared=100, us_prompt=0), book(), NOW) is None
    assert savings.note(released(miss="lora", us_prompt=0), book(), NOW) is None
    assert savings.pending == {}


def test_a_day_is_a_day_of_utc() -> None:
    """Midnight begins another row."""
    savings = measured()
    for now in (NOW, NOW + 86400):
        savings.note(released(n_shared=10), book(), now)
    assert [where.day for where in savings.pending] == [DAY, "2023-11-15"]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([HIT, "lora", "too_short"]), st.integers(0, 50)), max_size=30), st.data()
)
def test_however_often_it_is_taken_away_nothing_is_lost_or_counted_twice(
    noted: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    """What was taken, what came back and what is pending add up to what came in."""
    savings, written = Savings(), []
    for pool_id, outcome, n_tokens in noted:
        savings.add({Where(DAY, pool_id, outcome): Amount(1, n_tokens, 0.5)})
        if data.draw(st.booleans()):
            taken = savings.take()
            if data.draw(st.booleans()):
                savings.add(taken)
            else:
                written += list(taken.items())
    sums = summed([*written, *savings.pending.items()])
    for outcome in (HIT, "lora", "too_short"):
        want = [n_tokens for _, found, n_tokens in noted if found == outcome]
        have = sums.hits if outcome == HIT else sums.misses.get(outcome, Amount())
        assert (have.n_requests, have.n_tokens) == (len(want), sum(want))
