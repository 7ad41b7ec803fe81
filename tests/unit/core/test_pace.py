"""Mirrors core/pace.py."""

from math import exp, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.pace import WINDOW_S, WINDOW_TOKENS, Pace, Rate

ANY_TOKENS = st.integers(-5, 2**64)
ANY_TIME = st.floats(allow_nan=True, allow_infinity=True)
SAMPLES = st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-6, 1e4)), min_size=1, max_size=30)


def folded(samples: list[tuple[int, float]]) -> Pace:
    pace = Pace()
    for n_tokens, seconds in samples:
        pace = pace.after(n_tokens, seconds)
    return pace


def long(rate: float) -> Pace:
    """After a very long steady stream."""
    return Pace().after(round(1e6 * rate), 1e6)


def test_a_slow_sample_weighs_by_its_time() -> None:
    """Two seconds leave 1/e of the rate before: the plain average of rates."""
    assert long(10).after(2, WINDOW_S).value == pytest.approx(1 + (10 - 1) * exp(-1))


def test_a_quick_sample_weighs_by_its_tokens() -> None:
    """128 tokens leave 1/e of the time per token before."""
    each = WINDOW_S / WINDOW_TOKENS / 10
    before = 1 / (WINDOW_TOKENS / WINDOW_S * 2)
    after = long(1 / before).after(WINDOW_TOKENS, WINDOW_TOKENS * each).value
    assert after == pytest.approx(1 / (each + (before - each) * exp(-1)))


@pytest.mark.parametrize(("rate", "within"), [(8, 0.3), (100, 0.1), (1000, 0.1)])
def test_bursts_are_not_believed(rate: int, within: float) -> None:
    """Tokens that come eight at a time, after a wait each, are as many per second as they are."""
    pace = Pace()
    for _ in range(400):
        pace = pace.after(1, 7.9 / rate)
        for _ in range(7):
            pace = pace.after(1, 0.1 / 7 / rate)
    assert pace.value == pytest.approx(rate, rel=within)


@given(st.integers(1, 500), st.floats(0.1, 500), st.lists(st.integers(1, 50), min_size=1, max_size=20), st.floats(0.1, 500))
def test_at_a_steady_rate_the_cuts_do_not_matter(before: int, rate: float, cuts: list[int], old: float) -> None:
    """Any way to cut a steady stream into samples gives the same value as one sample of all of it."""
    start = Pace().after(before, before / old)
    pieces = start
    for n_tokens in cuts:
        pieces = pieces.after(n_tokens, n_tokens / rate)
    whole = start.after(sum(cuts), sum(cuts) / rate)
    assert pieces.value == pytest.approx(whole.value, rel=1e-9)


@given(SAMPLES)
def test_the_value_stays_among_its_samples(samples: list[tuple[int, float]]) -> None:
    """Never below the slowest sample, never above the fastest."""
    rates = [n_tokens / seconds for n_tokens, seconds in samples]
    value = folded(samples).value
    assert value is not None
    assert min(rates) * (1 - 1e-9) <= value <= max(rates) * (1 + 1e-9)


@given(st.lists(st.tuples(ANY_TOKENS, ANY_TIME)))
def test_whatever_comes_in_the_value_is_finite_or_none(samples: list[tuple[int, float]]) -> None:
    """No zero time, no clock that goes back, no burst and no NaN makes a figure that is none."""
    pace, rate = folded(samples), Rate()
    for amount, seconds in samples:
        rate = rate.after(amount, seconds)
        assert isfinite(rate.value)
        assert rate.value >= 0
        assert isfinite(rate.since(seconds if isfinite(seconds) else 1.0))
    assert pace.value is None or (isfinite(pace.value) and pace.value > 0)


@given(SAMPLES, st.floats(0, 1e6), st.floats(0, 1e6))
def test_waiting_only_lowers_and_more_waiting_lowers_more(samples: list[tuple[int, float]], shorter: float, longer: float) -> None:
    """What a waiting reader sees never rises, and is what the average becomes if the token comes now."""
    pace = folded(samples)
    first, second = sorted((shorter, longer))
    assert pace.value is not None
    early, late = pace.waiting(first), pace.waiting(second)
    assert early is not None
    assert late is not None
    assert pace.value >= early >= late * (1 - 1e-9) > 0
    if first > 0 and early < pace.value:
        assert early == pace.after(1, first).value


def test_nobody_waits_before_the_first_sample() -> None:
    """Nothing known stays nothing known."""
    assert Pace().waiting(100.0) is None


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.floats(0.01, 10))
def test_a_rate_counts_every_second(amounts: list[int], step: float) -> None:
    """Over samples of one length it is the exponentially weighted mean, silence included; silence at the end just decays."""
    rate = Rate()
    for amount in amounts:
        rate = rate.after(amount, step)
    keep = exp(-step / WINDOW_S)
    want = sum(amount / step * (1 - keep) * keep**age for age, amount in enumerate(reversed(amounts)))
    assert rate.value == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert rate.since(step) == pytest.approx(rate.after(0, step).value, rel=1e-9, abs=1e-12)
