"""A successor takes name and pin; the old pool is left to its users; undone, all is as before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polykv_proxy.core.pools import Pin, Pool, PoolTree, Residency
from polykv_proxy.core.prefix import as_tokens, hash_prefix
from polykv_proxy.core.succession import succeed
from polykv_proxy.errors import ApiError


def pool(pool_id: int, name: str | None = None) -> Pool:
    tokens = as_tokens([pool_id])
    return Pool(pool_id, tokens, hash_prefix(tokens), Residency.RESIDENT, "f", 0.0, 0.0, name)


def test_the_name_leads_to_the_new_pool() -> None:
    """Name and pin move; the old pool has a time to live of nothing."""
    tree = PoolTree()
    pin = Pin("me", 9.0)
    tree.put(replace(pool(1, "a"), pin=pin, ttl_s=60.0))
    tree.put(replace(pool(2), ttl_s=1.0))
    done = succeed(tree, "a", 2, 30.0)
    old, new = done.after
    assert (tree.named("a"), old.pool_id, old.name, old.pin, old.ttl_s) == (new, 1, None, None, 0.0)
    assert (new.pool_id, new.pin, new.ttl_s) == (2, pin, 30.0)


def test_undone_it_has_not_happened() -> None:
    """Names, pins and times to live go back; what else has changed of the pools stays."""
    tree = PoolTree()
    tree.put(replace(pool(1, "a"), pin=Pin(None, None), ttl_s=60.0))
    tree.put(replace(pool(2), ttl_s=1.0))
    done = succeed(tree, "a", 2, None)
    tree.put(replace(done.after[0], last_access_ts=5.0))
    done.undo(tree)
    was = tree.named("a")
    assert was is not None
    assert (was.pool_id, was.pin, was.ttl_s, was.last_access_ts) == (1, Pin(None, None), 60.0, 5.0)
    new = tree.get(2)
    assert new is not None
    assert (new.name, new.pin, new.ttl_s) == (None, None, 1.0)


def test_a_free_name_is_taken_and_a_released_pool_takes_none() -> None:
    """Nobody has to have it; the taker has to be there."""
    tree = PoolTree()
    tree.put(pool(2))
    assert len(succeed(tree, "a", 2, None).after) == 1
    assert tree.named("a") is not None
    with pytest.raises(ApiError, match="was released"):
        succeed(tree, "b", 3, None)
