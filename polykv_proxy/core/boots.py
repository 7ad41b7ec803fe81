"""The engine comes and goes: what of the records is still true of the engine that answers now.

Law: KV is believed only while the engine's boot and sequence list say so. Each method is one turn over one ledger.
"""

from __future__ import annotations

from dataclasses import replace

from polykv_proxy.core.commands import Command, EndSession, FreeSeq
from polykv_proxy.core.events import EngineFacts, EngineSnapshot, SlotEvent, SlotEventKind
from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.pools import Pool, Residency

MODEL_CHANGED = "model_changed"


class Boots:
    """Reconciles one ledger with the engine."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tree = ledger.tree

    def ready(self, facts: EngineFacts, snapshot: EngineSnapshot, now: float) -> list[Command]:
        """The engine answered `hello` and `state`: believe what they show and nothing else.

        The first time in the life of this proxy, sequences and sessions that nobody here knows are given back.
        """
        before, self._ledger.facts = self._ledger.facts, facts
        commands = [] if before is not None and before.boot_id == facts.boot_id else self._forget_boot(facts.boot_id)
        commands += self._settle_books(snapshot, now)
        for pool in self._tree:
            self._reconcile(pool, facts, snapshot)
        if before is None:
            known = {session.number for session in self._ledger.sessions}
            commands += self.strays(snapshot) + [EndSession(number) for number in sorted(snapshot.sessions - known)]
        return commands

    def lost(self, reason: str) -> None:
        """Nobody answers at the engine's address: what was resident is lost until the same boot is seen again."""
        for pool in self._tree:
            if pool.seq is not None and pool.residency is Residency.RESIDENT:
                self._tree.put(pool.displaced(Residency.LOST, reason))

    def strays(self, snapshot: EngineSnapshot) -> list[Command]:
        """Give back the sequences that no pool has. Only for moments at which none is being made."""
        ours = {pool.seq for pool in self._tree if pool.seq is not None}
        return [FreeSeq(seq, snapshot.boot_id) for seq in sorted(set(snapshot.seqs) - ours)]

    def _forget_boot(self, boot_id: str) -> list[Command]:
        ledger = self._ledger
        ledger.lineage.clear()
        ledger.condemned.clear()
        for book in ledger.books:
            ledger.books.close(book.req)
        for session in ledger.sessions:
            ledger.sessions.end(session.session_id)
        commands: list[Command] = []
        for pool in reversed(list(self._tree)):
            placement = ledger.placement(pool.pool_id)
            if pool.residency is Residency.RELEASING:
                commands += ledger.remove(pool)
            elif placement is not None and placement.boot_id != boot_id:
                ledger.fell(pool.pool_id)
        return commands

    def _settle_books(self, snapshot: EngineSnapshot, now: float) -> list[Command]:
        """Events may have been missed: a task that was running and holds no slot any more is over."""
        commands: list[Command] = []
        for book in self._ledger.books:
            if book.req in snapshot.reqs:
                continue
            for index in book.open_tasks:
                gone = SlotEvent(SlotEventKind.RELEASED, book.req, index, book.session or 0, None)
                commands += self._ledger.engine_event(gone, now)
        return commands

    def _reconcile(self, pool: Pool, facts: EngineFacts, snapshot: EngineSnapshot) -> None:
        """1. being made: its maker finds out. 2. of another model: failed. 3. of a model that is back: lost. 4. held or not."""
        ledger = self._ledger
        placement = ledger.placement(pool.pool_id)
        held = placement is not None and placement.boot_id == facts.boot_id and placement.seq in snapshot.seqs
        if pool.residency is Residency.MATERIALIZING:
            return
        if pool.fingerprint != facts.fingerprint:
            if pool.reason != MODEL_CHANGED:
                ledger.displace(pool.pool_id, Residency.FAILED, MODEL_CHANGED)
                self._give_up(pool.pool_id)
        elif pool.residency is Residency.FAILED and pool.reason == MODEL_CHANGED and pool.failure is None:
            self._tree.put(pool.displaced(Residency.LOST, "its model is back"))
        elif pool.residency in {Residency.LOST, Residency.SAVED} and held and placement is not None:
            ledger.put_placed(pool, placement)
        elif pool.residency is Residency.RESIDENT and not held:
            self._tree.put(pool.displaced(Residency.LOST, "the engine no longer holds it"))

    def _give_up(self, pool_id: int) -> None:
        """What was never made of a model that is gone is not tried again."""
        pool = self._tree.get(pool_id)
        if pool is not None and pool.failure is not None:
            self._tree.put(replace(pool, failure=replace(pool.failure, lasting=True)))
