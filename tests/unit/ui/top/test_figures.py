"""Mirrors ui/top/figures.py: bars and figures for any value."""

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.ui.top.figures import bar, parts, rate, seconds, size, spark

AMOUNTS = st.floats(0, 1e18, allow_nan=False)


@given(AMOUNTS, AMOUNTS, st.integers(1, 80))
def test_a_bar_fits_and_what_is_there_is_seen(value: float, largest: float, width: int) -> None:
    """Never longer than its width, whole for the largest, and not empty above zero."""
    drawn = bar(value, largest, width)
    assert len(drawn) <= width
    if value > 0 and largest > 0:
        assert drawn
    if value >= largest > 0:
        assert drawn == "█" * width


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=6), st.integers(6, 80))
def test_parts_fill_the_width_and_hide_nobody(values: list[float], width: int) -> None:
    """Characters add up; whoever has something has one."""
    given_ = parts(values, width)
    total = sum(values)
    assert sum(given_) == (width if total > 0 else 0)
    assert all(n >= 1 for n, value in zip(given_, values, strict=True) if value > 0 and total > 0)
    assert all(n == 0 for n, value in zip(given_, values, strict=True) if value == 0)


@given(st.lists(st.none() | AMOUNTS, max_size=40))
def test_a_spark_has_a_character_for_each_value(values: list[float | None]) -> None:
    """Gaps are blank and the largest is the highest."""
    drawn = spark(values)
    assert len(drawn) == len(values)
    assert [n for n, value in enumerate(values) if value is None] == [n for n, char in enumerate(drawn) if char == " "]


def test_figures_are_words_for_people() -> None:
    """Units change where numbers grow long; what is not known is a dash."""
    assert [rate(None), rate(float("nan")), rate(7.0), rate(99.96), rate(1234.5)] == ["-", "-", "7.0", "100.0", "1,234"]
    assert [size(None), size(0), size(1500), size(2**20 * 300), size(2**40)] == ["-", "0 B", "1.5 KiB", "300 MiB", "1024.0 GiB"]
    assert [seconds(None), seconds(0.12), seconds(3.21), seconds(119)] == ["", "120 ms", "3.2 s", "119.0 s"]
    assert [seconds(120), seconds(7199), seconds(7200), seconds(3600 * 1500)] == ["2 min", "120 min", "2.0 h", "1,500.0 h"]
