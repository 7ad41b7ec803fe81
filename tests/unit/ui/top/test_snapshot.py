"""Mirrors ui/top/snapshot.py: the KV cache by owner."""

from polykv_proxy.ui.top.snapshot import Snapshot
from tests.unit.ui.top.snapshots import pool, snapshot


def test_kv_adds_up_to_the_cache() -> None:
    """What pools, sessions and others have, and what is free, is all there is."""
    found = snapshot(pool(1, sessions=("a", "b")), pool(2))
    assert found.kv_bytes() == {"pools": 3000, "private": 600, "other": 500, "free": 100_000 - 4100}


def test_what_is_not_known_is_empty() -> None:
    """Before anything was heard there are no pools, no sessions, no bytes, and nothing is said of what is free."""
    assert (Snapshot().pools, Snapshot().sessions()) == ([], [])
    assert Snapshot().kv_bytes() == {"pools": 0, "private": 0, "other": 0}
