"""Mirrors core/retention.py: the laws over random trees."""

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.retention import Candidate, Keep, choose, rank


@st.composite
def forests(draw: st.DrawFn) -> list[Candidate]:
    """Pools with KV in any shape; who has children is kept by them unless something stronger keeps it."""
    n = draw(st.integers(0, 12))
    parents = [draw(st.one_of(st.none(), st.integers(1, i - 1))) if i > 1 else None for i in range(1, n + 1)]
    keeps = st.sampled_from([None, None, None, Keep.RUNNING, Keep.ATTACHED, Keep.PINNED, Keep.GRACE])
    return [
        Candidate(
            i,
            parents[i - 1],
            draw(st.integers(0, 500)),
            draw(st.floats(0, 1e6)),
            draw(keeps) or (Keep.CHILDREN if i in parents else None),
        )
        for i in range(1, n + 1)
    ]


NEEDS = {"n_ids": st.integers(0, 5), "n_cells": st.integers(0, 1500)}


@given(forest=forests(), **NEEDS)
def test_nothing_kept_leaves_and_no_parent_before_its_child(forest: list[Candidate], n_ids: int, n_cells: int) -> None:
    """Pinned, used and fresh pools stay; when a pool is chosen all its children were chosen before."""
    gone: set[int] = set()
    for chosen in choose(forest, n_ids=n_ids, n_cells=n_cells):
        assert chosen.keep in {None, Keep.CHILDREN}
        assert {c.pool_id for c in forest if c.parent == chosen.pool_id} <= gone
        assert chosen.pool_id not in gone
        gone.add(chosen.pool_id)


@given(forest=forests(), **NEEDS)
def test_nothing_leaves_in_vain(forest: list[Candidate], n_ids: int, n_cells: int) -> None:
    """What leaves is enough, without its last it is not; nothing leaves when all that may would not be enough."""
    chosen = choose(forest, n_ids=n_ids, n_cells=n_cells)

    def enough(some: list[Candidate]) -> bool:
        return len(some) >= n_ids and sum(c.own_tokens for c in some) >= n_cells

    if chosen:
        assert enough(chosen)
        assert not enough(chosen[:-1])
    else:
        assert enough([]) or not enough(evictable(forest))


@given(forests())
def test_evictable_and_protected_are_all(forest: list[Candidate]) -> None:
    """Each pool with KV is either evictable, now or after its children, or protected by itself or from below."""
    free = {c.pool_id for c in evictable(forest)}
    assert free == {c.pool_id for c in choose(forest, n_ids=len(free))}
    assert choose(forest, n_ids=len(free) + 1) == []


@given(forests())
def test_of_those_that_may_the_least_worth_keeping_goes_first(forest: list[Candidate]) -> None:
    """The first to leave has the longest idle time per token to compute again among the leaves that may."""
    parents = {c.parent for c in forest}
    leaves = [c for c in forest if c.keep is None and c.pool_id not in parents]
    chosen = choose(forest, n_ids=1)
    assert [c.pool_id for c in chosen] == ([min(leaves, key=rank).pool_id] if leaves else [])


def test_cost_weighs_against_age() -> None:
    """A long prefix outlives a short one that was used later, until it is idle for longer in proportion."""
    long, short = Candidate(1, None, 1000, 100.0), Candidate(2, None, 10, 50.0)
    assert choose([long, short], n_ids=1) == [short]
    assert choose([Candidate(1, None, 1000, 10_000.0), short], n_ids=1) == [Candidate(1, None, 1000, 10_000.0)]


def evictable(forest: list[Candidate]) -> list[Candidate]:
    """The naive way: a pool may leave when neither it nor anything below is kept for its own sake."""

    def free(candidate: Candidate) -> bool:
        return candidate.keep in {None, Keep.CHILDREN} and all(free(c) for c in forest if c.parent == candidate.pool_id)

    return [c for c in forest if free(c)]
