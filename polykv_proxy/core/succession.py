"""One pool takes the place of another under its name.

Law: the name always leads to a pool that is whole. No cell and no session is touched: whoever is attached to the old pool stays
there, and the old pool goes leaf first, like any other whose time to live is over, when nobody uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polykv_proxy.core.pools import Pool, PoolTree
from polykv_proxy.errors import ApiError


@dataclass(frozen=True, slots=True)
class Succession:
    """The records before and after, the old pool (where there is one) in front of the new."""

    before: tuple[Pool, ...]
    after: tuple[Pool, ...]

    def undo(self, tree: PoolTree) -> None:
        """Give names, pins and times to live back."""
        for was in reversed(self.before):
            pool = tree.get(was.pool_id)
            if pool is not None:
                tree.put(replace(pool, name=was.name, pin=was.pin, ttl_s=was.ttl_s))


def succeed(tree: PoolTree, name: str, pool_id: int, ttl_s: float | None) -> Succession:
    """A pool without a name takes a name, from the pool that has it, and that one's pin. ApiError 404 when it is gone."""
    new = tree.get(pool_id)
    if new is None:
        raise ApiError("pool_not_found", f"pool {pool_id} was released before it could take the name {name!r}")
    old = tree.named(name)
    taken = replace(new, name=name, ttl_s=ttl_s, pin=old.pin if old is not None else new.pin)
    before = (new,) if old is None else (old, new)
    after = (taken,) if old is None else (replace(old, name=None, pin=None, ttl_s=0.0), taken)
    for pool in after:
        tree.put(pool)
    return Succession(before, after)
