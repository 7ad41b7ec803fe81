"""Mirrors core/admission/reservations.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.admission.load import Load, Run
from polykv_proxy.core.admission.reservations import FIRST_ESTIMATE, LEAST_ESTIMATE, Answers, Need, Reservation, Reservations


def book(req: int, need: Need) -> Reservation:
    return Reservation(req, None, 1, None, need)


def test_what_the_load_shows_is_no_longer_reserved() -> None:
    """Slots once they are taken; cells once a first token says that the prompt is in, and then one for one."""
    made, need = Reservations(), Need(2, 100, 50)
    made.make(book(7, need))
    assert (made.slots(Load()), made.cells(Load()), made.unseen(Load())) == (2, 300, 2)
    half = Load(runs={7: Run(0, 1)})
    assert (made.slots(half), made.cells(half), made.unseen(half)) == (1, 300, 0)
    later = Load(runs={7: Run(20, 2)})
    assert (made.slots(later), made.cells(later)) == (0, 60)
    assert made.cells(Load(runs={7: Run(99, 2)})) == 0


def test_a_reservation_is_given_back_once() -> None:
    """The second time there is nothing to give."""
    made = Reservations()
    made.make(book(7, Need(1, 10, 10)))
    assert made.give_back(7) is not None
    assert made.give_back(7) is None
    assert (len(made), made.cells(Load())) == (0, 0)


def test_an_answer_without_a_limit_is_charged_what_answers_are_like() -> None:
    """First a guess; then the mean and two deviations."""
    answers = Answers()
    assert answers.estimate == FIRST_ESTIMATE
    for _ in range(200):
        answers.note(100)
    assert answers.estimate == 100
    for n in range(400):
        answers.note(50 if n % 2 else 150)
    assert 170 <= answers.estimate <= 230


@given(st.lists(st.integers(0, 100_000), min_size=1))
def test_an_estimate_is_never_beyond_all_reason(lengths: list[int]) -> None:
    """Between the least charge and three times the longest answer."""
    answers = Answers()
    for n_tokens in lengths:
        answers.note(n_tokens)
    assert LEAST_ESTIMATE <= answers.estimate <= max(LEAST_ESTIMATE, 3 * max(lengths))
