"""Mirrors core/rates.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.rates import PREFILL_ESTIMATE, Rate, Rates

SAMPLES = st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e3)), min_size=1)


def test_before_the_first_measurement_there_is_an_estimate() -> None:
    """What took no time, or did nothing, is no measurement."""
    rate = Rate(5.0)
    rate.note(10, 0.0)
    rate.note(0, 1.0)
    assert (rate.per_s, rate.measured) == (5.0, False)
    rate.note(10, 1.0)
    assert (rate.per_s, rate.measured) == (10.0, True)


@given(SAMPLES)
def test_a_rate_lies_between_the_slowest_and_the_fastest(samples: list[tuple[float, float]]) -> None:
    """Whatever came in which order."""
    rate = Rate(1.0)
    for amount, seconds in samples:
        rate.note(amount, seconds)
    found = [amount / seconds for amount, seconds in samples]
    assert min(found) * 0.999 <= rate.per_s <= max(found) * 1.001


def test_long_measurements_count_more_and_old_ones_fade() -> None:
    """A short one with its fixed costs hardly moves a long one; after many new ones the old is forgotten."""
    rate = Rate(1.0)
    rate.note(10_000, 10.0)
    rate.note(1, 0.1)
    assert rate.per_s > 900
    for _ in range(40):
        rate.note(50, 1.0)
    assert rate.per_s == pytest.approx(50, rel=0.01)


def test_a_copy_pays_when_reading_beats_computing() -> None:
    """Writing counts only where somebody waits for it."""
    rates = Rates()
    rates.prefill.note(1000, 1.0)
    rates.write.note(1000, 1.0)
    rates.read.note(1000, 1.0)
    assert rates.copy_pays(1000, 499, written_in_passing=False)
    assert not rates.copy_pays(1000, 501, written_in_passing=False)
    assert rates.copy_pays(1000, 999, written_in_passing=True)
    assert not rates.copy_pays(1000, 1001, written_in_passing=True)


def test_the_estimate_saves_on_middling_machines() -> None:
    """A 135M model's 22 KiB a token are saved; 320 KiB a token are not before a disk was seen to be fast."""
    assert Rates().copy_pays(1000, 1000 * 22 * 1024, written_in_passing=False)
    assert not Rates().copy_pays(1000, 1000 * 320 * 1024, written_in_passing=False)
    assert PREFILL_ESTIMATE > 0
