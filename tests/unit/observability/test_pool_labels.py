"""Labels of pools."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.observability.pool_labels import OTHER, PoolCounter, PoolLabels

LIVES = st.lists(st.dictionaries(st.integers(1, 12), st.integers(0, 5), max_size=12), max_size=30)


def test_the_first_pools_have_a_label_of_their_own() -> None:
    """Ids for as many as the limit says, `other` for the rest."""
    labels = PoolLabels(limit=2)
    labels.see([3, 1, 2])
    assert labels.sums({1: 5, 2: 6, 3: 7}) == {"1": 5, "2": 6, OTHER: 7}


def test_a_pool_keeps_its_label_and_one_that_goes_makes_place_for_a_new_one() -> None:
    """Nobody moves from `other` to a name, where its whole count would appear at once."""
    labels = PoolLabels(limit=1)
    labels.see([1, 2])
    labels.see([2])
    assert labels.of(2) == OTHER
    labels.see([2, 3])
    assert (labels.of(2), labels.of(3)) == (OTHER, "3")


@given(LIVES)
def test_whatever_pools_come_and_go_counts_never_fall_and_series_stay_few(lives: list[dict[int, int]]) -> None:
    """At most limit + 1 labels, and under each label of a pool that stays the count only grows (F068, F024)."""
    labels = PoolLabels(limit=3)
    counter = PoolCounter(labels)
    counts: dict[int, int] = {}
    before: dict[str, float] = {}
    for added in lives:
        counts = {pool_id: counts.get(pool_id, 0) + more for pool_id, more in added.items()}
        labels.see(counts)
        sums = counter.sums(counts)
        assert len(sums) <= 4
        assert sums.get(OTHER, 0) >= before.get(OTHER, 0)
        assert all(sums[label] >= before[label] for label in sums.keys() & before.keys() if label != OTHER and int(label) in counts)
        before = {label: value for label, value in sums.items() if label == OTHER or int(label) in counts}
