"""What callers are shown of pools, sessions and the engine: JSON-ready values from records and the engine's snapshot.

Law: reads only, awaits nothing. KV is counted by ownership, see accounts.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.lifetime import WITH_KV
from polykv_proxy.core.pools import Pool
from polykv_proxy.core.sessions import Session
from polykv_proxy.engine.wire import Hello, SlotState, State
from polykv_proxy.runtime.accounts import Accounts


class View:
    """Renders one ledger. `hello` may be None while no engine is known. `first_seq` starts the numbers of what is new."""

    def __init__(self, ledger: Ledger, first_seq: int = 1) -> None:
        self._ledger = ledger
        self._seq = first_seq
        self._last_shown = ""

    def pool(self, pool: Pool, hello: Hello | None, state: State | None = None) -> dict[str, object]:
        """One pool with its sessions."""
        return self._pool(pool, Accounts(self._ledger, hello, state))

    def subtree(self, pool: Pool, hello: Hello | None, state: State | None, depth: int | None = None) -> dict[str, object]:
        """One pool, and under `subtree` all below it down to `depth` levels, parents first."""
        accounts = Accounts(self._ledger, hello, state)
        levels = {pool.pool_id: 0}
        below = []
        for found in self._ledger.tree.subtree(pool.pool_id)[1:]:
            levels[found.pool_id] = levels[found.parent or 0] + 1
            if depth is None or levels[found.pool_id] <= depth:
                below.append(self._pool(found, accounts))
        return {**self._pool(pool, accounts), "subtree": below}

    def pools(self, hello: Hello | None, state: State | None, depth: int | None = None) -> dict[str, object]:
        """All pools by id, down to `depth` levels, the budget of sequence ids, and `seq`, which grows with anything new here."""
        accounts = Accounts(self._ledger, hello, state)
        shown = {
            "pools": [self._pool(pool, accounts) for pool in self._ledger.tree],
            "tree_depth": self._ledger.tree.depth(),
            "seq_ids_used": len(state.seqs) if state else 0,
            "seq_ids_max": hello.max_pools if hello else 0,
            "other_kv_bytes": self._other_bytes(accounts),
            "kv_bytes": accounts.all_bytes(),
        }
        text = json.dumps(shown)
        if text != self._last_shown:
            self._last_shown, self._seq = text, self._seq + 1
        if depth is not None:
            levels = self._ledger.tree.levels()
            listed = zip(self._ledger.tree, list(shown["pools"]), strict=True)  # type: ignore[call-overload]
            shown["pools"] = [one for pool, one in listed if levels[pool.pool_id] <= depth]
        return {**shown, "seq": self._seq}

    def _other_bytes(self, accounts: Accounts) -> int:
        """Cells of slots without a session, and of sessions that are attached to no pool."""
        detached = [session.number for session in self._ledger.sessions if session.pool_id is None]
        return sum(accounts.session_bytes(number) for number in (0, *detached))

    def _pool(self, pool: Pool, accounts: Accounts) -> dict[str, object]:
        uses = accounts.uses
        children = self._ledger.tree.children(pool.pool_id)
        sessions = sorted(self._ledger.sessions.of_pool(pool.pool_id), key=lambda session: session.number)
        unused = not children and not sessions and not uses.running[pool.pool_id]
        return {
            "pool_id": pool.pool_id,
            "name": pool.name,
            "parent": pool.parent,
            "branch_pos": pool.branch_pos,
            "prefix_len": pool.prefix_len,
            "prefix_hash": pool.hashed.hex,
            "n_shared": pool.n_shared,
            "residency": pool.residency.value,
            "reason": pool.reason,
            "source": pool.source,
            "own_kv_bytes": accounts.own_bytes(pool.pool_id),
            "subtree_kv_bytes": accounts.subtree_bytes(pool.pool_id),
            "pinned": pool.pin is not None,
            "pin_owner": pool.pin.owner if pool.pin else None,
            "pin_until_ts": pool.pin.until_ts if pool.pin else None,
            "orphaned_pin": pool.pin is not None and unused,
            "kept_by": keep.value if (keep := uses.keep(pool)) and pool.residency in WITH_KV else None,
            "n_running": uses.running[pool.pool_id],
            "children": children,
            "sessions": [_pool_session(session, accounts) for session in sessions],
            "n_queries": pool.counts.n_queries,
            "n_hits": pool.counts.n_hits,
            "n_tokens_shared": pool.counts.n_tokens_shared,
            "n_rebuilds": pool.counts.n_rebuilds,
            "ttl_s": pool.ttl_s,
            "created_ts": pool.created_ts,
            "last_access_ts": pool.last_used_ts,
        }

    def session(self, session: Session, state: State | None) -> dict[str, object]:
        """One named session."""
        slots = Accounts(self._ledger, None, state).by_session.get(session.number, [])
        return {
            "session_id": session.session_id,
            "ephemeral": False,
            "pool_id": session.pool_id,
            "state": session.state,
            "n_streams": session.n_streams,
            "n_turns": session.n_turns,
            "tps_last_turn": session.last_tps,
            "n_slots": len(slots),
            **_slot_facts(_main(slots)),
            "created_ts": session.created_ts,
            "last_used_ts": session.last_used_ts,
        }

    def sessions(self, state: State | None) -> dict[str, object]:
        """All named sessions, and the running requests that named none."""
        named = sorted(self._ledger.sessions, key=lambda session: session.number)
        listed = [self.session(session, state) for session in named]
        unnamed = Accounts(self._ledger, None, state).by_session.get(0, [])
        return {"sessions": listed + [self._ephemeral(slot) for slot in unnamed if slot.state != "idle"]}

    def capacity(self, hello: Hello, state: State) -> dict[str, object]:
        """Sequence ids, cells and slots: used and in all."""
        busy = sum(slot.state != "idle" for slot in state.slots)
        return {
            "seq_ids_used": len(state.seqs),
            "seq_ids_max": hello.max_pools,
            "cells_used": state.cells.used,
            "cells_total": state.cells.total,
            **_streams(hello, state),
            "slots_busy": busy,
            "slots_total": len(state.slots) or hello.n_slots,
            "n_pools": len(self._ledger.tree),
            "max_pool_objects": self._ledger.limits.max_pool_objects,
            "n_sessions": len(self._ledger.sessions),
            "n_requests": len(self._ledger.books),
            "boot_id": state.boot_id,
            "update": state.update,
        }

    def _ephemeral(self, slot: SlotState) -> dict[str, object]:
        book = self._ledger.books.get(slot.req)
        return {
            "session_id": None,
            "ephemeral": True,
            "pool_id": book.pool_id if book else None,
            "state": "active" if slot.state == "generating" else "warming",
            "n_streams": 1,
            "req": slot.req or None,
            "n_slots": 1,
            **_slot_facts(slot),
        }


def _streams(hello: Hello, state: State) -> dict[str, int | None]:
    """Of a split cache: how many sequences it has room for, how many of them hold nothing, and the room of each."""
    kv = hello.kv
    if kv.unified:
        return {"kv_streams_total": None, "kv_streams_free": None, "kv_cells_per_stream": None}
    taken = len(state.seqs) + sum(slot.n_tokens > 0 or slot.state != "idle" for slot in state.slots)
    return {
        "kv_streams_total": kv.streams,
        "kv_streams_free": max(0, kv.streams - taken),
        "kv_cells_per_stream": kv.cells // kv.streams,
    }


def _pool_session(session: Session, accounts: Accounts) -> dict[str, object]:
    slots = accounts.by_session.get(session.number, [])
    return {
        "session_id": session.session_id,
        "state": session.state,
        "suffix_n_tokens": sum(max(0, slot.n_tokens - slot.n_shared) for slot in slots),
        "marginal_kv_bytes": accounts.session_bytes(session.number),
    }


def _main(slots: Sequence[SlotState]) -> SlotState | None:
    """The slot to show of several: a working one first, then the one with the most tokens."""
    return max(slots, key=lambda slot: (slot.session != 0, slot.state != "idle", slot.n_tokens), default=None)


def _slot_facts(slot: SlotState | None) -> dict[str, object]:
    return {
        "resident": slot is not None,
        "slot": slot.slot if slot else None,
        "ctx_used": slot.n_tokens if slot else 0,
        "ctx_total": slot.n_ctx if slot else None,
        "n_shared": slot.n_shared if slot else 0,
    }
