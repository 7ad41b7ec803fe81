"""Mirrors ui/top/rows.py: the tree, orders and filters."""

from polykv_proxy.ui.top.rows import Kind, Order, fastest, rows_of
from tests.unit.ui.top.snapshots import pool, savings, session, snapshot

FOREST = snapshot(
    pool(1, sessions=("a",)),
    pool(2, 1, sessions=("b", "zoe")),
    pool(3, 2, residency="evicted", own_kv_bytes=0),
    pool(4, pinned=True),
    sessions=(session("b", 9.0, pool_id=2), session("x", 4.0), session(None, 1.0, pool_id=4, req=77)),
)


def test_the_tree_has_children_below_their_parents() -> None:
    """Sessions come before pools below; who has no pool comes last, in a group."""
    drawn = [f"{row.lead}{row.name}" for row in rows_of(FOREST)]
    assert drawn == ["p1", "├─a", "└─p2", "   ├─b", "   ├─zoe", "   └─p3", "p4", "└─unnamed request", "without a pool", "└─x"]


def test_speeds_are_newer_than_the_list_of_pools() -> None:
    """A session has its state from the speeds and its KV from its pool."""
    found = {row.name: row for row in rows_of(FOREST)}["b"]
    assert (found.state, found.tps, found.kv_bytes, found.ttft_s) == ("active", 9.0, 300, 0.12)


def test_folded_rows_hide_what_is_below_them() -> None:
    """Nothing below is listed; the row says that there is something."""
    rows = rows_of(FOREST, folded={"pool 2"})
    assert [row.name for row in rows][:4] == ["p1", "a", "p2", "p4"]
    assert [(row.name, row.folded) for row in rows][2] == ("p2", True)


def test_words_keep_what_is_above_and_below() -> None:
    """A hit keeps its place in the tree, and a pool that is hit keeps what is below it, folded or not."""
    assert [row.name for row in rows_of(FOREST, words="ZO ")] == ["p1", "p2", "zoe"]
    assert [row.name for row in rows_of(FOREST, words="evict")] == ["p1", "p2", "p3"]
    assert [row.name for row in rows_of(FOREST, words="p2", folded={"pool 2"})] == ["p1", "p2", "b", "zoe", "p3"]
    assert [row.name for row in rows_of(FOREST, words="pinned")] == ["p4", "unnamed request"]
    assert rows_of(FOREST, words="nothing like it") == []


def test_orders_are_flat_with_the_largest_first() -> None:
    """Rows without the figure come last; groups are no rows then."""
    resting = session("slept", 99.0, pool_id=4, state="idle")
    found = rows_of(snapshot(*FOREST.pools, sessions=(*FOREST.tps["sessions"], resting)), Order.TPS)
    assert [row.name for row in found][:4] == ["b", "x", "unnamed request", "slept"]
    assert fastest(found) == 9.0
    assert [row.name for row in rows_of(FOREST, Order.KV)][:3] == ["p4", "p2", "p1"]
    spared = snapshot(pool(1), pool(2, savings=savings(5, 0.1)), pool(3, savings=savings(7, 0.2)))
    assert [row.name for row in rows_of(spared, Order.SAVED)] == ["p3", "p2", "p1"]
    assert all(row.kind is not Kind.GROUP and row.lead == "" for row in rows_of(FOREST, Order.CONTEXT))


def test_a_deep_and_wide_tree_is_drawn_once_each() -> None:
    """A thousand pools in one chain and a thousand sessions: each is one row, whatever the depth."""
    chain = [pool(n, n - 1 or None, sessions=(f"s{n}",)) for n in range(1, 1001)]
    rows = rows_of(snapshot(*chain))
    assert len({row.key for row in rows}) == len(rows) == 2000
