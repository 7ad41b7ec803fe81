"""Copies of pools' KV on disk: how large one will be, which leave when there is no room, and which are read back after a boot.

Law: pure. All copies together, one that is being written included, never exceed the limit. What leaves is the coldest: a pool is as
warm as the last use of it or of anything below it, so a parent's copy never leaves before its child's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from polykv_proxy.core.pools import REBUILDABLE, Pool, PoolTree, Residency

SPARE_CELLS = 0.25
"""Part of all cells that stays free of pools which are read back unasked: those who come meanwhile shall find room."""
_PER_TOKEN = 40
"""Bytes a token beside its KV: its id, the engine's record of its cell, its part of what stands before each 2,048 cells."""
_FRAME = 16 * 1024


@dataclass(frozen=True, slots=True)
class KvPrices:
    """Bytes of KV: a token, a token inside the window (of `window` tokens), a sequence's state."""

    per_token: float
    per_window_token: float = 0.0
    window: int = 0
    per_seq: int = 0


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy that is there. `busy`: it is being read."""

    pool_id: int
    n_bytes: int
    warmth: float
    level: int
    busy: bool = False


def file_bytes(pool: Pool, start: int, prices: KvPrices) -> int:
    """At most how large the file of `[start, L)` will be, its checkpoints aside."""
    n = pool.prefix_len - start
    window = min(n, prices.window) * prices.per_window_token
    return int(n * (prices.per_token + _PER_TOKEN) + window) + 4 * start + prices.per_seq + _FRAME


def warmths(pools: Iterable[Pool]) -> dict[int, float]:
    """When each pool, or anything below it, was last used. A child's id is larger than its parent's."""
    warm: dict[int, float] = {}
    for pool in sorted(pools, key=lambda pool: -pool.pool_id):
        warm[pool.pool_id] = max(pool.last_used_ts, warm.get(pool.pool_id, 0.0))
        if pool.parent is not None:
            warm[pool.parent] = max(warm[pool.pool_id], warm.get(pool.parent, 0.0))
    return warm


def shelf(tree: PoolTree) -> list[Kept]:
    """All copies there are."""
    warm, levels = warmths(tree), tree.levels()
    return [
        Kept(
            pool.pool_id,
            pool.copy.n_bytes,
            warm[pool.pool_id],
            levels[pool.pool_id],
            pool.residency is Residency.MATERIALIZING,
        )
        for pool in tree
        if pool.copy is not None
    ]


def to_drop(kept: Iterable[Kept], n_bytes: int, limit: int, warmth: float) -> list[Kept] | None:
    """The copies that leave, coldest first, so that `n_bytes` more fit; all are colder than `warmth`. None: there is no room."""
    kept = list(kept)
    excess = sum(copy.n_bytes for copy in kept) + n_bytes - limit
    colder = sorted(
        (copy for copy in kept if copy.warmth < warmth and not copy.busy), key=lambda copy: (copy.warmth, -copy.level, copy.pool_id)
    )
    dropped = []
    for copy in colder:
        if excess <= 0:
            break
        dropped.append(copy)
        excess -= copy.n_bytes
    return dropped if excess <= 0 else None


def hottest_first(pools: Iterable[Pool], tree: PoolTree) -> list[Pool]:
    """The warmest first, parents before their children."""
    warm = warmths(tree)
    return sorted(pools, key=lambda pool: (-warm[pool.pool_id], pool.pool_id))


def revival(tree: PoolTree, wanted: Collection[int]) -> list[Pool]:
    """Which of these pools to read back, hottest first, each after what it stands on.

    A copy that starts above 0 needs its parent's KV: where that is neither there nor read back, it waits for its next use.
    """
    order: dict[int, Pool] = {}
    for pool in hottest_first((pool for pool in tree if pool.pool_id in wanted), tree):
        order.update((step.pool_id, step) for step in _line(tree, pool, wanted))
    return list(order.values())


def _line(tree: PoolTree, pool: Pool, wanted: Collection[int]) -> list[Pool]:
    line: list[Pool] = []
    step: Pool | None = pool
    while step is not None and step.seq is None:
        if step.copy is None or step.residency not in REBUILDABLE or step.pool_id not in wanted:
            return []
        line.insert(0, step)
        step = tree.get(step.parent) if step.copy.start and step.parent is not None else None
    return line


def leaves_spare(n_cells: int, free: int, total: int) -> bool:
    """May `n_cells` be taken unasked? Models without cells have a total of 0."""
    return not total or free - n_cells >= SPARE_CELLS * total
