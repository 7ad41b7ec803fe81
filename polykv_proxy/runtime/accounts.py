"""Who holds how much KV: pools, sessions, and the slots of nobody, from the records and the engine's snapshot.

Law: reads only. Each cell in use is counted once; the sum over all is what the engine has in use (plain attention, at rest).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.lifetime import Uses
from polykv_proxy.core.ownership import Holder, owned_tokens
from polykv_proxy.core.pools import SeqRef
from polykv_proxy.engine.wire import Hello, SlotState, State


class Accounts:
    """One look at everything. `state` None: slots are not known."""

    def __init__(self, ledger: Ledger, hello: Hello | None, state: State | None) -> None:
        self._ledger = ledger
        self._bytes_per_token = hello.kv.bytes_per_token if hello is not None else 0
        self.uses = Uses(ledger)
        pools = [pool for pool in ledger.tree if pool.seq is not None]
        slots = state.slots if state is not None else []
        holders = [Holder(pool.seq, pool.base, pool.n_shared, pool.prefix_len) for pool in pools]
        shares = hello is None or hello.kv.unified
        holders += [_slot_holder(slot, shares=shares) for slot in slots]
        owned = owned_tokens(holders, ledger.lineage)
        self._of_pool = {pool.pool_id: own for pool, own in zip(pools, owned, strict=False)}
        of_slot = owned[len(pools) :]
        self.by_session: Mapping[int, list[SlotState]] = self._by_session(slots)
        self._of_session: defaultdict[int, int] = defaultdict(int)
        for slot, own in zip(slots, of_slot, strict=True):
            self._of_session[self.session_of(slot)] += own
        self._of_subtree: defaultdict[int, int] = defaultdict(int)
        self.n_tokens = sum(owned)
        self.idle_tokens = sum(own for slot, own in zip(slots, of_slot, strict=True) if self._is_spare(slot))
        """Cells that idle slots keep for nobody: any request may have them."""

    def own_bytes(self, pool_id: int) -> int:
        """Bytes of the cells that are the pool's own."""
        return self._bytes(self._of_pool.get(pool_id, 0))

    def session_bytes(self, number: int) -> int:
        """Bytes of the cells that only this session has; number 0: of all slots without a session."""
        return self._bytes(self._of_session[number])

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of all sessions that hold cells; 0 where slots without one do."""
        return frozenset(self._of_session)

    def subtree_bytes(self, pool_id: int) -> int:
        """Bytes of the pool, of all below it, and of the sessions attached there."""
        if not self._of_subtree:
            self._sum_up()
        return self._bytes(self._of_subtree[pool_id])

    def _sum_up(self) -> None:
        for session in self._ledger.sessions:
            if session.pool_id is not None:
                self._of_subtree[session.pool_id] += self._of_session[session.number]
        for pool in reversed(list(self._ledger.tree)):
            self._of_subtree[pool.pool_id] += self._of_pool.get(pool.pool_id, 0)
            if pool.parent is not None:
                self._of_subtree[pool.parent] += self._of_subtree[pool.pool_id]

    def all_bytes(self) -> int:
        """Bytes of everything in use."""
        return self._bytes(self.n_tokens)

    def session_of(self, slot: SlotState) -> int:
        """The number of the session that a slot works for or keeps tokens of; 0 for none."""
        book = self._ledger.books.get(slot.req)
        return slot.session or (book.session if book else None) or 0

    def _is_spare(self, slot: SlotState) -> bool:
        return slot.state == "idle" and self.session_of(slot) == 0

    def _bytes(self, n_tokens: int) -> int:
        return int(n_tokens * self._bytes_per_token)

    def _by_session(self, slots: list[SlotState]) -> Mapping[int, list[SlotState]]:
        """The slots of each session: those that hold its tokens, and those in which further variants of its requests run."""
        found: defaultdict[int, list[SlotState]] = defaultdict(list)
        for slot in slots:
            if slot.n_tokens or slot.state != "idle":
                found[self.session_of(slot)].append(slot)
        return found


def _slot_holder(slot: SlotState, *, shares: bool) -> Holder:
    """On a split cache what a slot took from a sequence are copies, and its own."""
    return Holder(None, SeqRef.parse(slot.seq) if slot.seq and shares else None, slot.n_shared, slot.n_tokens)
