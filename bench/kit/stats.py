"""Paired comparison on a noisy machine: palindromic order, ratios inside a block, medians with an exact interval.

Law: pure. No distribution is assumed: the interval of a median is a pair of order statistics (the sign test turned round).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and the interval that holds the true one with `coverage` (less than `CONFIDENCE` when there are few values)."""

    median: float
    low: float
    high: float
    coverage: float
    n: int

    def show(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def estimate(values: Iterable[float]) -> Estimate:
    """The narrowest symmetric pair of order statistics that covers the median with `CONFIDENCE`; else smallest and largest."""
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        raise ValueError("no values: a median needs at least one")
    rank = max((k for k in range(1, (n + 1) // 2 + 1) if coverage(n, k) >= CONFIDENCE), default=1)
    return Estimate(median(ordered), ordered[rank - 1], ordered[n - rank], coverage(n, rank), n)


def coverage(n: int, rank: int) -> float:
    """The chance that the true median lies between the `rank`-th smallest and the `rank`-th largest of n values."""
    return 1 - 2 * sum(comb(n, i) for i in range(rank)) / float(2**n)


def palindrome(sides: Sequence[str]) -> list[str]:
    """A B becomes A B B A: within one block every side has the same mean position, so a steady drift cancels."""
    return [*sides, *reversed(sides)]


def ratios(blocks: Sequence[dict[str, list[float]]], side: str, other: str) -> list[float]:
    """One ratio a block: the sum of a side's values over the sum of the other's."""
    return [sum(block[side]) / sum(block[other]) for block in blocks]


def differences(blocks: Sequence[dict[str, list[float]]], side: str, other: str) -> list[float]:
    """One difference a block: mean of a side's values minus mean of the other's."""
    return [sum(block[side]) / len(block[side]) - sum(block[other]) / len(block[other]) for block in blocks]


def best_ratio(blocks: Sequence[dict[str, list[float]]], side: str, other: str) -> float:
    """The smallest value of a side over the smallest of the other: what other work on the machine adds, it only adds."""
    return min(pooled(blocks, side)) / min(pooled(blocks, other))


def pooled(blocks: Sequence[dict[str, list[float]]], side: str) -> list[float]:
    """All values of a side."""
    return [value for block in blocks for value in block[side]]
