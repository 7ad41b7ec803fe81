"""What our routes answer of a view: the view's rows under the names of docs/http-api.md.

Law: pure; nothing is computed here that the view does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.savings import Amount, Where, summed
from polykv_proxy.runtime.rows import GpuRow, PoolRow, StateView, as_json
from polykv_proxy.runtime.savings import as_object

MOST_POOLS = 100
"""Listed of one day; its sum has all."""


def peers_page(row: GpuRow) -> dict[str, object]:
    """Who shares the device."""
    return {
        "enabled": row.enabled,
        "why": row.why,
        "gpu_key": row.gpu_key,
        "self": as_json(row.me) if row.me is not None else None,
        "peers": [as_json(peer) for peer in row.peers],
    }


class PoolsPage:
    """The listing of pools. Its `seq` and `ts` are those of the first look at which it was what it is."""

    def __init__(self) -> None:
        self._last = ""
        self._since: Mapping[str, object] = {}

    def pools(self, view: StateView, depth: int | None = None) -> dict[str, object]:
        """Pools by id, down to `depth` levels."""
        shown = {
            "pools": [as_json(row) for row in view.pools],
            "tree_depth": max(_levels(view).values(), default=0),
            "seq_ids_used": view.whole.seq_ids_used,
            "seq_ids_max": view.whole.seq_ids_max,
            "other_kv_bytes": view.whole.other_kv_bytes,
            "kv_bytes": view.whole.kv_bytes,
        }
        text = json.dumps(shown)
        if text != self._last:
            self._last, self._since = text, {"seq": view.seq, "ts": view.ts}
        if depth is not None:
            levels = _levels(view)
            shown["pools"] = [as_json(row) for row in view.pools if levels[row.pool_id] <= depth]
        return {**shown, **self._since}


def subtree_page(view: StateView, pool_id: int, depth: int | None = None) -> dict[str, object]:
    """One pool, and under `subtree` all below it down to `depth` levels, parents first."""
    rows = {row.pool_id: row for row in view.pools}
    below: list[PoolRow] = []
    waiting = [(child, 1) for child in reversed(rows[pool_id].children)]
    while waiting:
        found, level = waiting.pop()
        if depth is None or level <= depth:
            below.append(rows[found])
            waiting += [(child, level + 1) for child in reversed(rows[found].children)]
    return {**as_json(rows[pool_id]), "subtree": [as_json(row) for row in below]}


def _levels(view: StateView) -> dict[int, int]:
    """The level of each pool, roots at 1; parents stand before their children."""
    levels: dict[int, int] = {}
    for row in view.pools:
        levels[row.pool_id] = levels.get(row.parent or 0, 0) + 1
    return levels


def sessions_page(view: StateView) -> dict[str, object]:
    """All named sessions, and the running requests that named none."""
    return {"sessions": [as_json(row) for row in view.sessions], "seq": view.seq, "ts": view.ts}


def savings_page(view: StateView, days: Mapping[Where, Amount]) -> dict[str, object]:
    """What pools spared: in all these days, by day, and of each day by pool, those that spared most first."""
    names = {row.pool_id: row.name for row in view.pools}
    by_day: dict[str, list[tuple[Where, Amount]]] = {}
    for where, amount in sorted(days.items()):
        by_day.setdefault(where.day, []).append((where, amount))
    shown = [{"day": day, **as_object(summed(rows)), "pools": _of_day(rows, names)} for day, rows in by_day.items()]
    return {**as_object(summed(days.items())), "days": shown, "seq": view.seq, "ts": view.ts}


def _of_day(rows: Iterable[tuple[Where, Amount]], names: Mapping[int, str | None]) -> list[Mapping[str, object]]:
    pools: dict[int, list[tuple[Where, Amount]]] = {}
    for where, amount in rows:
        pools.setdefault(where.pool_id, []).append((where, amount))
    sums = sorted(((summed(found), pool_id) for pool_id, found in pools.items()), key=lambda one: -one[0].hits.n_tokens)
    return [{"pool_id": pool_id or None, "name": names.get(pool_id), **as_object(one)} for one, pool_id in sums[:MOST_POOLS]]


def capacity_page(ledger: Ledger, view: StateView, update: int) -> dict[str, object]:
    """Sequence ids, cells and slots: used and in all."""
    return {
        **{name: getattr(view.whole, name) for name in _CAPACITY},
        "n_pools": len(ledger.tree),
        "max_pool_objects": ledger.limits.max_pool_objects,
        "n_sessions": len(ledger.sessions),
        "n_requests": len(ledger.books),
        "boot_id": view.boot_id,
        "update": update,
        "seq": view.seq,
        "ts": view.ts,
    }


_CAPACITY = (
    "seq_ids_used",
    "seq_ids_max",
    "cells_used",
    "cells_total",
    "kv_bytes_used",
    "kv_bytes_total",
    "kv_streams_total",
    "kv_streams_free",
    "kv_cells_per_stream",
    "slots_busy",
    "slots_total",
    "compaction_pressure",
)
