"""Histograms."""

from math import inf, nan

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.histogram import Histogram


@given(st.lists(st.floats(0, 10) | st.sampled_from([0.5, 1.0, 2.0]), max_size=50))
def test_a_bucket_counts_what_is_at_or_below_its_bound(values: list[float]) -> None:
    """Each bucket holds as many values as are not above its bound, and the last holds all."""
    histogram = Histogram((0.5, 1.0, 2.0))
    for value in values:
        histogram.add(value)
    assert list(histogram.buckets()) == [(bound, sum(v <= bound for v in values)) for bound in (0.5, 1.0, 2.0, inf)]
    assert histogram.count == len(values)


def test_a_value_may_be_entered_many_times() -> None:
    """Entering a value n times is n entries of it."""
    histogram = Histogram((1.0,))
    histogram.add(0.25, 4)
    assert (histogram.count, histogram.sum) == (4, 1.0)


def test_what_is_no_finite_number_is_not_counted() -> None:
    """None, NaN, infinities and nothing at all leave a histogram as it was."""
    histogram = Histogram((1.0,))
    for value in (None, nan, inf, -inf):
        histogram.add(value)
    histogram.add(0.5, 0)
    assert (histogram.count, histogram.sum) == (0, 0.0)
