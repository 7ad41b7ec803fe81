"""Mirrors core/pressure.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.pressure import compaction_pressure


@pytest.mark.parametrize(
    ("n_free", "contexts", "pressure"),
    [
        (1000, [], 0.0),
        (250, [], 0.0),
        (125, [], 0.5),
        (0, [], 1.0),
        (1000, [(75, 100)], 0.0),
        (1000, [(10, 100), (90, 100)], 0.6),
        (125, [(100, 100)], 1.0),
        (1000, [(5, 0)], 0.0),
    ],
)
def test_the_last_quarter_presses(n_free: int, contexts: list[tuple[int, int]], pressure: float) -> None:
    """Nothing until three quarters are used, everything at the wall, whichever of both is nearer."""
    assert compaction_pressure(n_free, 1000, contexts) == pytest.approx(pressure)


@given(st.integers(-10, 1000), st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 500), st.integers(0, 100)), max_size=5))
def test_it_stays_within_its_range(n_free: int, n_cells: int, contexts: list[tuple[int, int]]) -> None:
    """0..1, also without an engine and with contexts that overflow."""
    assert 0 <= compaction_pressure(n_free, n_cells, contexts) <= 1
