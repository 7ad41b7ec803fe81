"""What callers are shown of pools, sessions and the engine: JSON-ready values from records and the engine's snapshot.

Law: reads only, awaits nothing. KV is counted by ownership: a pool's bytes are those of its own `[branch_pos, L)`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.pools import Pool
from polykv_proxy.core.sessions import Session
from polykv_proxy.engine.wire import Hello, SlotState, State


class View:
    """Renders one ledger. `hello` may be None while no engine is known."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def pool(self, pool: Pool, hello: Hello | None, state: State | None = None) -> dict[str, object]:
        """One pool with its sessions."""
        books = self._ledger.books.of_pool(pool.pool_id)
        slots = self._by_session(state)
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
            "own_kv_bytes": _own_bytes(pool, hello),
            "n_running": len(books),
            "children": self._ledger.tree.children(pool.pool_id),
            "sessions": [_pool_session(s, slots[s.number], hello) for s in self._ledger.sessions.of_pool(pool.pool_id)],
            "n_queries": pool.counts.n_queries,
            "n_hits": pool.counts.n_hits,
            "n_tokens_shared": pool.counts.n_tokens_shared,
            "ttl_s": pool.ttl_s,
            "created_ts": pool.created_ts,
            "last_access_ts": pool.last_access_ts,
        }

    def pools(self, hello: Hello | None, state: State | None) -> dict[str, object]:
        """All pools and the budget of sequence ids."""
        return {
            "pools": [self.pool(pool, hello, state) for pool in self._ledger.tree],
            "tree_depth": self._ledger.tree.depth(),
            "seq_ids_used": len(state.seqs) if state else 0,
            "seq_ids_max": hello.max_pools if hello else 0,
        }

    def session(self, session: Session, state: State | None) -> dict[str, object]:
        """One named session."""
        slots = self._by_session(state)[session.number]
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
        working = [slot for slot in (state.slots if state else []) if slot.state != "idle"]
        return {"sessions": listed + [self._ephemeral(slot) for slot in working if not self._session_of(slot)]}

    def capacity(self, hello: Hello, state: State) -> dict[str, object]:
        """Sequence ids, cells and slots: used and in all."""
        busy = sum(slot.state != "idle" for slot in state.slots)
        return {
            "seq_ids_used": len(state.seqs),
            "seq_ids_max": hello.max_pools,
            "cells_used": state.cells.used,
            "cells_total": state.cells.total,
            "slots_busy": busy,
            "slots_total": len(state.slots) or hello.n_slots,
            "n_pools": len(self._ledger.tree),
            "max_pool_objects": self._ledger.limits.max_pool_objects,
            "n_sessions": len(self._ledger.sessions),
            "n_requests": len(self._ledger.books),
            "boot_id": state.boot_id,
            "update": state.update,
        }

    def _by_session(self, state: State | None) -> Mapping[int, list[SlotState]]:
        """The slots of each session: those that hold its tokens, and those in which further variants of its requests run."""
        found: defaultdict[int, list[SlotState]] = defaultdict(list)
        for slot in state.slots if state else []:
            if slot.n_tokens or slot.state != "idle":
                found[self._session_of(slot)].append(slot)
        return found

    def _session_of(self, slot: SlotState) -> int:
        """The number of the session that a slot works for or keeps tokens of; 0 for none."""
        book = self._ledger.books.get(slot.req)
        return slot.session or (book.session if book else None) or 0

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


def _pool_session(session: Session, slots: Sequence[SlotState], hello: Hello | None) -> dict[str, object]:
    suffix = sum(max(0, slot.n_tokens - slot.n_shared) for slot in slots)
    per_token = hello.kv.bytes_per_token if hello else 0
    return {
        "session_id": session.session_id,
        "state": session.state,
        "suffix_n_tokens": suffix,
        "marginal_kv_bytes": int(suffix * per_token),
    }


def _own_bytes(pool: Pool, hello: Hello | None) -> int:
    if pool.seq is None or hello is None:
        return 0
    return int((pool.prefix_len - pool.branch_pos) * hello.kv.bytes_per_token)


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
