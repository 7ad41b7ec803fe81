"""Which KV is not believed any more, who holds cells of it, and what becomes of the pools that do.

Law: by sequences, not by pools: what was computed on wrong cells is wrong, wherever in the tree it stands, and a pool that was made
anew under the same id is not. Each method changes the records in one turn; nothing here looks at KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polykv_proxy.core.commands import Command, DropCopy, FreeSeq, SavePool
from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.ownership import Lineage
from polykv_proxy.core.pools import Residency, SeqRef


@dataclass(frozen=True, slots=True)
class Condemned:
    """Pools that lost their KV, parents first, and what follows."""

    pool_ids: tuple[int, ...]
    commands: tuple[Command, ...]


def makers(lineage: Lineage, seq: SeqRef, n: int) -> Iterator[SeqRef]:
    """The sequences that made the first `n` cells of `seq`, those of the last cells first."""
    maker: SeqRef | None = seq
    while maker is not None and n > 0:
        below, start = lineage.get(maker, (None, 0))
        if below is None or n > start:
            yield maker
        maker, n = below, min(n, start)


class Quarantine:
    """The quarantine of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tree = ledger.tree

    def blame(self, seq: SeqRef, n: int) -> SeqRef:
        """Whose cells are in doubt when an answer that looks at the first `n` of a sequence is wrong: the last maker's of them.

        A wrong cell further down is one of an answer that looks at less, or is found when the sequence was made anew.
        """
        return next(makers(self._ledger.lineage, seq, n), seq)

    def root(self, seq: SeqRef) -> SeqRef:
        """The sequence that made the very first cells of a sequence."""
        *_, first = makers(self._ledger.lineage, seq, 1)
        return first

    def tainted(self, seq: SeqRef | None, n: int) -> bool:
        """Are cells that are not believed among the first `n` of this sequence, living or gone?"""
        condemned = self._ledger.condemned
        return bool(condemned) and seq is not None and any(maker in condemned for maker in makers(self._ledger.lineage, seq, n))

    def condemn(self, seq: SeqRef, reason: str) -> Condemned:
        """Believe no cell any more that this sequence made: all pools that hold one lose their KV, to be made anew from tokens.

        Requests that run on them keep their cells. Copies of their KV, and of that of any pool below them, are not believed either.
        """
        self._ledger.condemned.add(seq)
        held = [pool for pool in self._tree if pool.residency is Residency.RESIDENT and self.tainted(pool.seq, pool.prefix_len)]
        below = {under.pool_id for pool in held for under in self._tree.subtree(pool.pool_id)}
        drop = [DropCopy(pool.pool_id) for pool in self._tree if pool.pool_id in below and pool.copy is not None]
        for command in drop:
            self._ledger.set_copy(command.pool_id, None)
        free: list[Command] = []
        for pool in reversed(held):
            placement = self._ledger.displace(pool.pool_id, Residency.QUARANTINED, reason)
            free += [FreeSeq(placement.seq, placement.boot_id)] if placement is not None else []
        return Condemned(tuple(pool.pool_id for pool in held), (*free, *drop, *(SavePool(pool_id) for pool_id in sorted(below))))

    def give_up(self, pool_id: int, reason: str) -> Condemned:
        """Condemn what a pool made itself, and never make it again: failed."""
        pool = self._tree.get(pool_id)
        if pool is None or pool.seq is None:
            return Condemned((), ())
        condemned = self.condemn(pool.seq, reason)
        self._ledger.displace(pool_id, Residency.FAILED, reason)
        return condemned
