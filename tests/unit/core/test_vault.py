"""Mirrors core/vault.py."""

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.pools import Pool, PoolTree, Residency, SavedCopy, SeqRef
from polykv_proxy.core.prefix import as_tokens, hash_prefix
from polykv_proxy.core.vault import (
    Kept,
    KvPrices,
    file_bytes,
    hottest_first,
    leaves_spare,
    revival,
    shelf,
    to_drop,
    warmths,
)

LOST, RESIDENT, SAVED = Residency.LOST, Residency.RESIDENT, Residency.SAVED


def pool(pool_id: int, parent: int | None = None, *, used: float = 0.0, **more: object) -> Pool:
    tokens = as_tokens([1, *range(2, 2 + pool_id)])
    more.setdefault("residency", LOST)
    return Pool(
        pool_id,
        tokens,
        hash_prefix(tokens),
        fingerprint="m",
        created_ts=0.0,
        last_access_ts=used,
        parent=parent,
        branch_pos=1 if parent else 0,
        **more,  # type: ignore[arg-type]
    )


def tree_of(*pools: Pool) -> PoolTree:
    tree = PoolTree()
    for one in pools:
        tree.put(one)
    return tree


@st.composite
def trees(draw: st.DrawFn) -> PoolTree:
    """Any small tree with any use, any copies and any KV."""
    tree = PoolTree()
    for pool_id in range(1, draw(st.integers(1, 9)) + 1):
        parent = draw(st.one_of(st.none(), st.integers(1, pool_id - 1))) if pool_id > 1 else None
        copy = draw(st.one_of(st.none(), st.integers(1, 100).map(lambda n: SavedCopy(n, 0))))
        if copy is not None and parent is not None and draw(st.booleans()):
            copy = SavedCopy(copy.n_bytes, 1)
        made = pool(pool_id, parent, used=draw(st.integers(0, 5)) * 1.0, copy=copy)
        if draw(st.booleans()):
            made = made.placed(SeqRef(pool_id, 1), 1)
        tree.put(made)
    return tree


@given(trees())
def test_a_pool_is_as_warm_as_the_warmest_below_it(tree: PoolTree) -> None:
    """Never colder than its children, and exactly the largest of the subtree."""
    warm = warmths(tree)
    for one in tree:
        assert warm[one.pool_id] == max(below.last_used_ts for below in tree.subtree(one.pool_id))


@given(trees(), st.integers(0, 120), st.integers(0, 400), st.integers(0, 6))
def test_what_leaves_makes_room_and_no_more(tree: PoolTree, n_bytes: int, limit: int, warmth: int) -> None:
    """The rest and the new one fit; each that left was needed, was colder, and no parent left before its child."""
    kept = shelf(tree)
    found = to_drop(kept, n_bytes, limit, float(warmth))
    sizes = {copy.pool_id: copy.n_bytes for copy in kept}
    colder = {copy.pool_id for copy in kept if copy.warmth < warmth}
    if found is None:
        assert sum(size for pool_id, size in sizes.items() if pool_id not in colder) + n_bytes > limit
        return
    dropped = [copy.pool_id for copy in found]
    left = sum(sizes.values()) - sum(sizes[pool_id] for pool_id in dropped)
    assert left + n_bytes <= limit
    assert set(dropped) <= colder
    assert not dropped or left + sizes[dropped[-1]] + n_bytes > limit
    for pool_id in dropped:
        below = {one.pool_id for one in tree.subtree(pool_id)} & set(sizes) - {pool_id}
        assert below <= set(dropped[: dropped.index(pool_id)])


def test_a_copy_that_is_being_read_stays() -> None:
    """Something colder or not at all."""
    kept = [Kept(1, 10, 1.0, 1, busy=True), Kept(2, 10, 2.0, 1)]
    assert to_drop(kept, 10, 20, 9.0) == kept[1:]
    assert to_drop(kept, 20, 20, 9.0) is None
    assert to_drop(kept, 10, 20, 2.0) is None, "as warm is not colder"
    assert [copy.busy for copy in shelf(tree_of(pool(1, copy=SavedCopy(1, 0), residency=Residency.MATERIALIZING)))] == [True]


@given(trees(), st.sets(st.integers(1, 9)))
def test_what_is_read_back_stands_on_something(tree: PoolTree, wanted: set[int]) -> None:
    """Only wanted pools with a copy and without KV; before each, what its copy starts on; hottest first."""
    order = revival(tree, wanted)
    there = {one.pool_id for one in tree if one.seq is not None}
    for one in order:
        assert one.pool_id in wanted
        assert one.copy is not None
        assert one.pool_id not in there
        assert not one.copy.start or one.parent in there
        there.add(one.pool_id)
    for one in tree:
        if one.pool_id in wanted and one.copy is not None and one.pool_id not in there:
            assert one.copy.start, "a whole copy needs nobody"
            assert one.parent not in there
    warm = warmths(tree)
    heats = [warm[one.pool_id] for one in order]
    assert heats == sorted(heats, reverse=True)


def test_the_hottest_comes_first_and_parents_before_children() -> None:
    """Use below a pool is use of the pool."""
    tree = tree_of(pool(1, used=1), pool(2, used=5), pool(3, 1, used=9))
    assert [one.pool_id for one in hottest_first(tree, tree)] == [1, 3, 2]
    saved = tree_of(*(pool(n, p, used=u, copy=SavedCopy(1, 1 if p else 0)) for n, p, u in ((1, None, 1), (2, None, 5), (3, 1, 9))))
    assert [one.pool_id for one in revival(saved, {1, 2, 3})] == [1, 3, 2]
    assert [one.pool_id for one in revival(saved, {2, 3})] == [2], "3 stands on 1, which was not there before"


def test_an_estimate_covers_cells_window_and_states() -> None:
    """Each part counts; a part of a pool costs its own tokens only."""
    one = pool(99)
    plain = file_bytes(one, 0, KvPrices(1000.0))
    assert 100 * 1000 < plain < 100 * 1000 + 100 * 50 + 20_000
    assert file_bytes(one, 60, KvPrices(1000.0)) < plain - 59_000
    assert file_bytes(one, 0, KvPrices(1000.0, 500.0, 10, 7000)) - plain == 500 * 10 + 7000


def test_spare_cells_are_left() -> None:
    """A quarter of all; models without cells have none to spare."""
    assert (leaves_spare(50, 75, 100), leaves_spare(51, 75, 100), leaves_spare(10**6, 0, 0)) == (True, False, True)


def test_saved_is_being_without_kv_and_with_a_copy() -> None:
    """A pool with a copy is `saved` wherever it would be evicted or lost, and is one of these again without it."""
    one = pool(1).placed(SeqRef(4, 1), 2).with_copy(SavedCopy(9, 0), LOST)
    assert (one.residency, one.seq) == (RESIDENT, SeqRef(4, 1))
    for without in (LOST, Residency.EVICTED):
        saved = one.displaced(without, "why")
        assert (saved.residency, saved.seq, saved.copy) == (SAVED, None, SavedCopy(9, 0))
        assert saved.with_copy(None, without).residency is without
    for other in (Residency.FAILED, Residency.QUARANTINED, Residency.MATERIALIZING, Residency.RELEASING):
        assert one.displaced(other, "why").residency is other
        assert one.displaced(other, "why").with_copy(None, LOST).residency is other
    assert pool(1).with_copy(SavedCopy(9, 0), LOST).residency is SAVED
