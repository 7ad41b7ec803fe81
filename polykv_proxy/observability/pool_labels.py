"""The values of the label `pool`: few, whatever callers make.

Law: a pool keeps its label for life, so that no series jumps; what pools under `other` have counted stays there when they go.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

LIMIT = 100
NONE = "none"
OTHER = "other"


class PoolLabels:
    """A label of its own, its id, for each of the first `limit` pools; `other` for the rest until they go."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._named: set[int] = set()
        self._others: set[int] = set()

    def see(self, living: Collection[int]) -> None:
        """The pools there are now: labels of those that have gone come free, for new ones."""
        self._named.intersection_update(living)
        self._others.intersection_update(living)
        for pool_id in sorted(set(living) - self._named - self._others):
            (self._named if len(self._named) < self._limit else self._others).add(pool_id)

    def sees(self, pool_id: int) -> bool:
        """Is it one of those there are now?"""
        return pool_id in self._named or pool_id in self._others

    def of(self, pool_id: int) -> str:
        """The label of a pool that was seen."""
        return str(pool_id) if pool_id in self._named else OTHER

    def sums(self, values: Mapping[int, float]) -> dict[str, float]:
        """Values of pools, summed by label."""
        found: dict[str, float] = {}
        for pool_id, value in values.items():
            label = self.of(pool_id)
            found[label] = found.get(label, 0) + value
        return found


class PoolCounter:
    """One count of each pool, by label. It never falls: under `other` only what is added counts."""

    def __init__(self, labels: PoolLabels) -> None:
        self._labels = labels
        self._last: dict[int, float] = {}
        self._other = 0.0

    def sums(self, counts: Mapping[int, float]) -> dict[str, float]:
        """The counts of now."""
        others = {pool_id: count for pool_id, count in counts.items() if self._labels.of(pool_id) == OTHER}
        self._other += sum(count - self._last.get(pool_id, 0) for pool_id, count in others.items())
        self._last = others
        sums = self._labels.sums(counts)
        return {**sums, OTHER: self._other} if self._other or OTHER in sums else sums
