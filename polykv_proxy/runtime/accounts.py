"""Who holds how much KV: pools, sessions, and what is nobody's, from the records and the engine's count.

Law: reads only. The engine counts each byte in use once, for the oldest sequence that holds it or else for a slot; here the
owners get names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.lifetime import Uses
from polykv_proxy.core.pools import SeqRef
from polykv_proxy.engine.wire import SeqState, SlotState, State

_NOTHING = SeqState(seq="0.0", n_tokens=0)


class Accounts:
    """One look at everything. `state` None: the engine does not answer, and nobody holds anything that is known."""

    def __init__(self, ledger: Ledger, state: State | None) -> None:
        self._ledger = ledger
        self.uses = Uses(ledger)
        seqs = {SeqRef.parse(seq.seq): seq for seq in state.seqs} if state is not None else {}
        slots = state.slots if state is not None else []
        self._of_pool = {pool.pool_id: seqs.pop(pool.seq, _NOTHING) for pool in ledger.tree if pool.seq is not None}
        self._stray_bytes = sum(seq.own_bytes for seq in seqs.values()) + (state.kv_bytes.other if state is not None else 0)
        self.by_session: Mapping[int, list[SlotState]] = self._by_session(slots)
        self._of_session: defaultdict[int, int] = defaultdict(int)
        for slot in slots:
            self._of_session[self.session_of(slot)] += slot.own_bytes
        self._of_subtree: defaultdict[int, int] = defaultdict(int)
        self.idle_cells = sum(slot.own_cells for slot in slots if slot.state == "idle" and self.session_of(slot) == 0)
        """Cells that idle slots keep for nobody: any request may have them."""

    def own_bytes(self, pool_id: int) -> int:
        """Bytes that are the pool's own."""
        return self._of_pool.get(pool_id, _NOTHING).own_bytes

    def checkpoint_bytes(self, pool_id: int) -> int:
        """Host memory of the states that the pool keeps along its prefix; one that its parent keeps too is the parent's."""
        return self._of_pool.get(pool_id, _NOTHING).checkpoint_bytes

    def holds(self, number: int) -> bool:
        """Does any slot work for this session, or keep something of it?"""
        return number in self._of_session

    def session_bytes(self, number: int) -> int:
        """Bytes that only this session has."""
        return self._of_session.get(number, 0)

    def subtree_bytes(self, pool_id: int) -> int:
        """Bytes of the pool, of all below it, and of the sessions attached there."""
        if not self._of_subtree:
            self._sum_up()
        return self._of_subtree[pool_id]

    def _sum_up(self) -> None:
        for session in self._ledger.sessions:
            if session.pool_id is not None:
                self._of_subtree[session.pool_id] += self.session_bytes(session.number)
        for pool in reversed(list(self._ledger.tree)):
            self._of_subtree[pool.pool_id] += self.own_bytes(pool.pool_id)
            if pool.parent is not None:
                self._of_subtree[pool.parent] += self._of_subtree[pool.pool_id]

    def other_bytes(self) -> int:
        """Bytes of what belongs to no pool and no session attached to one: work of our own too."""
        attached = {session.number for session in self._ledger.sessions if session.pool_id is not None}
        return self._stray_bytes + sum(n_bytes for number, n_bytes in self._of_session.items() if number not in attached)

    def all_bytes(self) -> int:
        """Bytes of everything."""
        pools = sum(seq.own_bytes for seq in self._of_pool.values())
        return pools + sum(self._of_session.values()) + self._stray_bytes

    def session_of(self, slot: SlotState) -> int:
        """The number of the session that a slot works for or keeps tokens of; 0 for none."""
        book = self._ledger.books.get(slot.req)
        return slot.session or (book.session if book else None) or 0

    def _by_session(self, slots: list[SlotState]) -> Mapping[int, list[SlotState]]:
        """The slots of each session: those that hold its tokens, and those in which further variants of its requests run."""
        found: defaultdict[int, list[SlotState]] = defaultdict(list)
        for slot in slots:
            if slot.n_tokens or slot.state != "idle":
                found[self.session_of(slot)].append(slot)
        return found
