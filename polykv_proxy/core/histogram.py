"""Histograms: how often values were at or below rising bounds.

Law: pure counting. What is no number, or no finite one, is not counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf, isfinite


class Histogram:
    """Counts values; `sum` is theirs, and the last bucket is that of all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds rise"
        self._bounds = (*bounds, inf)
        self._counts = [0] * len(self._bounds)
        self.sum = 0.0

    def add(self, value: float | None, times: int = 1) -> None:
        """Enter a value, `times` times over. None: there was nothing to measure."""
        if value is not None and isfinite(value) and times > 0:
            self._counts[bisect_left(self._bounds, value)] += times
            self.sum += value * times

    @property
    def count(self) -> int:
        """How many values were entered."""
        return sum(self._counts)

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Each bound, and how many values were at or below it; the last bound is infinite."""
        return zip(self._bounds, accumulate(self._counts), strict=True)
