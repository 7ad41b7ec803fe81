"""Pools and sessions as rows: in the tree, or flat and sorted.

Law: pure. Work grows with the number of rows; a row says what it is, not how it looks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from polykv_proxy.ui.top.snapshot import Facts, Snapshot, session_key


class Order(StrEnum):
    """How rows are ordered. All but `tree` are flat, the largest first; by speed those that rest come after those that run."""

    TREE = "tree"
    TPS = "tokens per second"
    KV = "KV"
    CONTEXT = "context"
    SAVED = "saved"


class Kind(StrEnum):
    """What a row is."""

    POOL = "pool"
    SESSION = "session"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class Row:
    """One row; None where there is no such figure. `lead` draws the tree in front of it; `folded` is None with nothing below."""

    key: str
    kind: Kind
    name: str
    state: str
    lead: str = ""
    folded: bool | None = None
    pinned: bool = False
    n_tokens: int | None = None
    kv_bytes: int | None = None
    tps: float | None = None
    ttft_s: float | None = None
    ctx_used: int | None = None
    ctx_total: int | None = None
    saved_n_tokens: int | None = None
    saved_s: float | None = None
    n_missed: int | None = None

    @property
    def speed(self) -> float:
        """Tokens per second now: of a session that rests, none."""
        return self.tps or 0.0 if self.state != "idle" else 0.0


_NOWHERE = Row("group none", Kind.GROUP, "without a pool", "")


def rows_of(snapshot: Snapshot, order: Order = Order.TREE, words: str = "", folded: Collection[str] = ()) -> list[Row]:
    """All rows; with `words` those that have them in their name or state, and what is above them."""
    below = _children(snapshot)
    words = words.strip().lower()
    if order is Order.TREE:
        return _tree(below, _matching(below, words) if words else None, folded)
    rows = [row for rows in below.values() for row in rows if row.kind is not Kind.GROUP and _has(row, words)]
    return sorted(rows, key=lambda row: _measure(row, order), reverse=True)


def _children(snapshot: Snapshot) -> dict[str, list[Row]]:
    """Rows by the key of the row above; "" at the top. Sessions come before pools."""
    known = {pool["pool_id"] for pool in snapshot.pools}
    below: dict[str, list[Row]] = {}
    for session in snapshot.sessions():
        above = f"pool {session['pool_id']}" if session["pool_id"] in known else _NOWHERE.key
        below.setdefault(above, []).append(_session_row(session))
    for pool in snapshot.pools:
        above = f"pool {pool['parent']}" if pool["parent"] in known else ""
        below.setdefault(above, []).append(_pool_row(pool))
    if _NOWHERE.key in below:
        below.setdefault("", []).append(_NOWHERE)
    return below


def _pool_row(pool: Facts) -> Row:
    return Row(
        f"pool {pool['pool_id']}",
        Kind.POOL,
        pool["name"] or f"pool {pool['pool_id']}",
        pool["residency"],
        pinned=pool["pinned"],
        n_tokens=pool["prefix_len"] - pool["branch_pos"],
        kv_bytes=pool["own_kv_bytes"],
        **_saved(pool.get("savings", {})),
    )


def _saved(savings: Facts) -> dict[str, Any]:
    if not savings:
        return {}
    missed = sum(miss["n_requests"] for miss in savings["misses"].values())
    return {"saved_n_tokens": savings["n_tokens"], "saved_s": savings["seconds"], "n_missed": missed}


def _session_row(session: Facts) -> Row:
    ttft_ms = session.get("ttft_ms")
    return Row(
        session_key(session),
        Kind.SESSION,
        session["session_id"] or "unnamed request",
        session["state"],
        n_tokens=session.get("suffix_n_tokens"),
        kv_bytes=session.get("marginal_kv_bytes"),
        tps=session.get("tps_ewma"),
        ttft_s=None if ttft_ms is None else ttft_ms / 1000,
        ctx_used=session.get("ctx_used"),
        ctx_total=session.get("ctx_total"),
    )


def _tree(below: dict[str, list[Row]], shown: set[str] | None, folded: Collection[str]) -> list[Row]:
    rows: list[Row] = []
    waiting = [(row, "", "") for row in reversed(_kept(below.get("", []), shown))]
    while waiting:
        row, lead, stem = waiting.pop()
        children = _kept(below.get(row.key, []), shown)
        shut = row.key in folded and shown is None
        rows.append(replace(row, lead=lead, folded=shut if children else None))
        if shut:
            continue
        for child in reversed(children):
            last = child is children[-1]
            waiting.append((child, f"{stem}{'└─' if last else '├─'}", f"{stem}{'   ' if last else '│  '}"))
    return rows


def _kept(rows: Sequence[Row], shown: set[str] | None) -> list[Row]:
    return [row for row in rows if shown is None or row.key in shown]


def _matching(below: dict[str, list[Row]], words: str) -> set[str]:
    """Keys of rows that have the words, of all above them and all below them."""
    above = {row.key: key for key, rows in below.items() for row in rows}
    shown: set[str] = set()
    waiting = [(row, False) for row in below.get("", [])]
    while waiting:
        row, within = waiting.pop()
        hit = within or _has(row, words)
        key = row.key if hit else ""
        while key and key not in shown:
            shown.add(key)
            key = above.get(key, "")
        waiting += [(child, hit) for child in below.get(row.key, [])]
    return shown


def _has(row: Row, words: str) -> bool:
    return words in f"{row.name} {row.state}{' pinned' if row.pinned else ''}".lower()


def _measure(row: Row, order: Order) -> tuple[float, float]:
    found = {Order.TPS: row.tps, Order.KV: row.kv_bytes, Order.CONTEXT: row.ctx_used, Order.SAVED: row.saved_n_tokens}.get(order)
    return row.speed if order is Order.TPS else 0.0, -1.0 if found is None else float(found)


def fastest(rows: Sequence[Row]) -> float:
    """The speed of the fastest row."""
    return max((row.speed for row in rows), default=0.0)
