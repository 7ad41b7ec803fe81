"""Paired statistics: order, intervals, ratios."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kit.stats import coverage, differences, estimate, palindrome, ratios


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_interval_holds_the_median_and_is_made_of_values(values: list[float]) -> None:
    """low <= median <= high, both ends were measured, and the coverage is 95 % from six values on."""
    result = estimate(values)
    assert result.low <= result.median <= result.high
    assert {result.low, result.high} <= set(values)
    assert (result.coverage >= 0.95) == (len(values) >= 6)


def test_coverage_is_that_of_the_sign_test() -> None:
    """Known values: smallest and largest of six cover 1 - 2/64; second ones of ten 1 - 2 * 11/1024."""
    assert coverage(6, 1) == 1 - 2 / 64
    assert coverage(10, 2) == 1 - 2 * 11 / 1024
    assert (estimate(range(10)).low, estimate(range(10)).high) == (1, 8)


def test_interval_covers_as_often_as_it_says() -> None:
    """Over many samples of a skewed distribution the true median is inside at least as often as promised."""
    source, inside = random.Random(1), 0
    for _ in range(2000):
        result = estimate([source.expovariate(1.0) for _ in range(15)])
        inside += result.low <= 0.6931 <= result.high
    assert inside / 2000 >= 0.95 - 0.015


def test_a_steady_drift_cancels_in_a_palindrome() -> None:
    """When every trial takes a little longer than the one before, sides of equal cost have ratio 1 and difference 0."""
    block: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    for n, side in enumerate(palindrome(list(block))):
        block[side].append(10 + n)
    assert ratios([block], "a", "b") == ratios([block], "c", "a") == [1.0]
    assert differences([block], "a", "c") == [0.0]


def test_no_values_are_refused() -> None:
    """A median of nothing is an error, not a number."""
    with pytest.raises(ValueError, match="no values"):
        estimate([])
