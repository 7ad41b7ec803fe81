"""Mirrors core/verification.py: where a check looks, by which prompts, and what it makes of the answers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.prefix import as_tokens
from polykv_proxy.core.verification import (
    FACTOR,
    LEAST,
    LEAST_QUANTISED,
    N_TAIL,
    UNLIKE,
    Step,
    choose_positions,
    distance,
    expected_cached,
    growing,
    judge,
    long_prompt,
    shrinking,
)

POSITIONS = st.lists(st.integers(2, 500), min_size=1, max_size=20, unique=True).map(sorted)
SHAPES = st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))


@given(SHAPES, st.integers(0, N_TAIL + 1), st.integers(1, 30), st.integers(0, 50))
def test_positions_are_places_of_the_prompt(shape: tuple[int, int], room: int, n: int, turn: int) -> None:
    """Ascending, at most as many as asked for, none that a prompt cannot reach; the place past the end is one wherever it can."""
    prefix_len, own_start = shape
    longest = prefix_len + room
    found = choose_positions(prefix_len, own_start, longest, n, turn)
    assert list(found) == sorted(set(found))
    assert len(found) <= n
    assert all(2 <= position <= min(longest, prefix_len + N_TAIL) for position in found)
    assert found or longest < 2
    assert room == 0 or prefix_len + 1 in found
    if n >= 4 and own_start >= 1:
        assert own_start + 1 in found


@given(SHAPES, st.integers(5, 12))
def test_in_time_a_check_comes_by_everywhere(shape: tuple[int, int], n: int) -> None:
    """Over as many turns as the prefix has tokens, thrice, each place of it is looked at."""
    prefix_len, own_start = shape
    seen = {p for turn in range(3 * prefix_len + 3) for p in choose_positions(prefix_len, own_start, prefix_len + 9, n, turn)}
    missing = set(range(2, prefix_len + N_TAIL)) - seen
    assert not {p for p in missing if p > own_start}
    assert n < 8 or not missing


@given(POSITIONS, st.booleans(), st.integers(0, 600))
def test_each_place_is_compared_once_by_a_token_alone(positions: list[int], halves: bool, own_start: int) -> None:
    """Both orders compare exactly the positions, each by a prompt of which all but the last token is there already."""
    for steps in (list(growing(positions, halves=halves)), list(shrinking(positions, own_start))):
        held = 0
        for step in steps:
            if step.compared:
                assert expected_cached(step, held) == step.n_prompt - 1
            held = step.n_prompt
        assert sorted(step.n_prompt for step in steps if step.compared) == positions
    lengths = [step.n_prompt for step in growing(positions, halves=halves)]
    assert lengths == sorted(set(lengths))


def test_the_two_orders_split_a_prompt_differently() -> None:
    """The one computes it in two strides, as a child pool was; the other from place to place, or in halves of that."""
    strides = [(40, False), (100, False), (100, True), (7, True)]
    assert [(step.n_prompt, step.compared) for step in shrinking([7, 100], 40)] == strides
    assert list(growing([7, 100])) == [Step(6, False), Step(7, True), Step(99, False), Step(100, True)]
    assert list(growing([7, 100], halves=True))[3:] == [Step(53, False), Step(99, False), Step(100, True)]
    assert list(growing([2, 3])) == [Step(1, False), Step(2, True), Step(3, True)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=50))
def test_the_tail_repeats_tokens_of_the_prefix(ids: list[int]) -> None:
    """Prompts begin with the prefix, and what follows are ids that the model knows."""
    prompt = long_prompt(as_tokens(ids))
    assert prompt.dtype == np.int32
    assert prompt[: len(ids)].tolist() == ids
    assert len(prompt) == len(ids) + N_TAIL
    assert set(prompt.tolist()) == set(ids)


PROBS = st.dictionaries(st.integers(0, 30), st.floats(-20, 0), min_size=1, max_size=15)


@given(PROBS, PROBS)
def test_distance_is_symmetric_and_nothing_between_equals(a: dict[int, float], b: dict[int, float]) -> None:
    """It is the same both ways, never negative, and 0 for the same candidates."""
    assert distance(a, b) == distance(b, a) >= 0
    assert distance(a, a) == 0


def test_distance_counts_what_one_side_does_not_list() -> None:
    """A candidate that the other side does not list is there at most as likely as its last; no list, or not a number, is as far as
    can be; a candidate of low rank on both sides says nothing.
    """
    assert distance({1: -0.5, 2: -3.0}, {2: -3.0, 3: -2.5}) == pytest.approx(2.5)
    assert distance({}, {1: -1.0}) == UNLIKE
    assert distance({1: math.nan}, {1: -1.0}) == UNLIKE
    assert distance({1: -math.inf}, {1: -1.0}) == UNLIKE
    low = {n: -float(n) for n in range(12)}
    assert distance(low, {**low, 11: -19.0}) == 0


def test_a_pool_is_as_far_off_as_from_the_nearer_reference() -> None:
    """The floor is how far two computations without the pool are from one another; thrice that, or LEAST, is not too far."""
    one, two = {5: {1: -1.0}, 9: {1: -2.0}}, {5: {1: -1.2}, 9: {1: -2.0}}
    assert judge(one, [one]).first_bad is None
    alone = judge({5: {1: -1.5}, 9: {1: -2.0}}, [one])
    assert (alone.first_bad, alone.tolerance, alone.max_abs_diff) == (5, LEAST, pytest.approx(0.5))
    both = judge({5: {1: -1.5}, 9: {1: -2.0}}, [one, two])
    assert both.distances == {5: pytest.approx(0.3), 9: 0}
    assert both.tolerance == pytest.approx(FACTOR * 0.2)
    assert both.first_bad is None
    assert judge({5: {1: -2.5}, 9: {1: -7.0}}, [one, two]).first_bad == 5


def test_two_computations_that_agree_are_no_proof_on_quantised_weights() -> None:
    """There the floor of two that agree to the bit is none: half a log-prob is rounding, more than one is not."""
    one = {5: {1: -1.0}}
    near = judge({5: {1: -1.5}}, [one, one], quantised=True)
    assert (near.first_bad, near.tolerance) == (None, LEAST_QUANTISED)
    assert judge({5: {1: -1.5}}, [one, one]).first_bad == 5
    assert judge({5: {1: -2.5}}, [one, one], quantised=True).first_bad == 5
    assert judge(one, [one, {5: {1: -1.5}}], quantised=True).tolerance == pytest.approx(FACTOR * 0.5)
