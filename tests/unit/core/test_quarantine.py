"""Mirrors core/quarantine.py: against cells as things, in random histories of pools and slots; and what becomes of records."""

from dataclasses import replace

from hypothesis import given

from polykv_proxy.core.commands import DropCopy, FreeSeq, SavePool
from polykv_proxy.core.events import EngineFacts
from polykv_proxy.core.ledger import Ledger, LedgerLimits, Placement
from polykv_proxy.core.pools import Pin, Pool, Residency, SavedCopy, SeqRef
from polykv_proxy.core.prefix import as_tokens, hash_prefix
from polykv_proxy.core.quarantine import Quarantine, makers
from tests.unit.core.test_ownership import STEPS, Cache, Thing

A, B, C, D, E = (SeqRef(n, 1) for n in range(4, 9))


class Makers(Cache):
    """The naive model, which also notes who made each cell: the sequence that first had it."""

    def __init__(self) -> None:
        super().__init__()
        self.made_by: dict[int, SeqRef] = {}

    def enter(self, thing: Thing) -> Thing:
        super().enter(thing)
        assert thing.ref is not None
        for cell in thing.cells:
            self.made_by.setdefault(cell, thing.ref)
        return thing


@given(STEPS)
def test_makers_are_those_who_made_the_cells(steps: list[tuple[str, int, int, int]]) -> None:
    """After each step the makers of each sequence, by the records alone, are the makers of its very cells; so for a part of it."""
    cache = Makers()
    for step in steps:
        cache.step(*step)
        for pool in cache.pools:
            assert pool.ref is not None
            for n in {len(pool.cells), (len(pool.cells) + 1) // 2}:
                assert set(makers(cache.lineage, pool.ref, n)) == {cache.made_by[cell] for cell in pool.cells[:n]}


def ledger_of(*rows: tuple[int, int | None, int, int, SeqRef, SeqRef | None, int]) -> Ledger:
    """Pools by (id, parent, branch_pos, length, sequence, base, n_shared)."""
    ledger = Ledger(LedgerLimits())
    ledger.facts = EngineFacts("boot", "f", 100, 4096, 8, "any", "")
    for pool_id, parent, branch_pos, length, seq, base, n_shared in rows:
        tokens = as_tokens(list(range(length)))
        pool = Pool(
            pool_id, tokens, hash_prefix(tokens), Residency.MATERIALIZING, "f", 0.0, 0.0, parent=parent, branch_pos=branch_pos
        )
        ledger.begin_pool(pool)
        ledger.place(pool_id, Placement("boot", seq, length, base, n_shared))
    return ledger


def family() -> Ledger:
    """1 of 40 tokens; 2 below it shares 40, 3 below that shares 44; 4 below 1 shares 10; 5 stands alone."""
    return ledger_of(
        (1, None, 0, 40, A, None, 0),
        (2, 1, 40, 50, B, A, 40),
        (3, 2, 44, 60, C, B, 44),
        (4, 1, 10, 30, D, A, 10),
        (5, None, 0, 9, E, None, 0),
    )


def residencies(ledger: Ledger) -> list[str]:
    return [pool.residency.value for pool in ledger.tree]


def test_who_holds_a_condemned_cell_loses_its_kv() -> None:
    """Parents first in the answer, leaf first in the engine; record, pin and tokens stay; what shares none is not touched."""
    ledger = family()
    second = ledger.tree.get(2)
    assert second is not None
    ledger.tree.put(replace(second, pin=Pin("me", None)))
    condemned = Quarantine(ledger).condemn(B, "it differs")
    assert condemned.pool_ids == (2, 3)
    assert [c.seq for c in condemned.commands if isinstance(c, FreeSeq)] == [C, B]
    assert [c.pool_id for c in condemned.commands if isinstance(c, SavePool)] == [2, 3]
    assert residencies(ledger) == ["resident", "quarantined", "quarantined", "resident", "resident"]
    after = ledger.tree.get(2)
    assert after is not None
    assert (after.seq, after.pin, after.reason, after.prefix_len) == (None, Pin("me", None), "it differs", 50)
    assert ledger.placement(2) is None


def test_all_that_shares_the_root_goes_with_it() -> None:
    """So do the copies of their KV, also of a pool below that has none in the engine now; records say so at once."""
    ledger = family()
    for pool_id in (2, 3, 5):
        ledger.set_copy(pool_id, SavedCopy(100, 0))
    ledger.displace(3, Residency.EVICTED, "idle")
    assert residencies(ledger)[2] == "saved"
    condemned = Quarantine(ledger).condemn(A, "it differs")
    assert condemned.pool_ids == (1, 2, 4)
    assert [c.pool_id for c in condemned.commands if isinstance(c, DropCopy)] == [2, 3]
    assert residencies(ledger) == ["quarantined", "quarantined", "evicted", "quarantined", "resident"]
    assert [pool.pool_id for pool in ledger.tree if pool.copy is not None] == [5]


def test_who_shares_only_cells_of_somebody_else_is_not_concerned() -> None:
    """3 shares 30 tokens of 2, all of which are cells of 1: what 2 made itself is not among them."""
    ledger = ledger_of((1, None, 0, 40, A, None, 0), (2, 1, 40, 50, B, A, 40), (3, 2, 30, 60, C, B, 30))
    assert Quarantine(ledger).condemn(B, "it differs").pool_ids == (2,)
    assert Quarantine(ledger).condemn(A, "it differs").pool_ids == (1, 3)


def test_blame_falls_on_the_maker_of_the_last_cell_looked_at() -> None:
    """An answer that looks at 45 cells of 3 sees some of 2, one at 40 sees only those of 1; the first of all is the root's."""
    ledger = family()
    quarantine = Quarantine(ledger)
    assert [quarantine.blame(C, n) for n in (60, 45, 44, 41, 40, 1)] == [C, C, B, B, A, A]
    assert (quarantine.root(C), quarantine.root(A)) == (A, A)


def test_what_ran_on_condemned_cells_is_tainted() -> None:
    """By the sequence that a slot shares and by how much of it, living or gone; a pool that was made anew is not."""
    ledger = family()
    quarantine = Quarantine(ledger)
    quarantine.condemn(B, "it differs")
    assert [quarantine.tainted(seq, n) for seq, n in ((B, 41), (B, 40), (C, 60), (A, 40), (None, 0), (C, 0))] == [
        True,
        False,
        True,
        False,
        False,
        False,
    ]
    ledger.begin_rebuild(2)
    ledger.place(2, Placement("boot", SeqRef(9, 1), 50, A, 40))
    assert quarantine.condemn(B, "again").pool_ids == ()


def test_a_pool_that_is_given_up_fails_and_those_on_it_are_made_anew() -> None:
    """Failed: a request is served without it. What shares its cells is quarantined, what it shares is not."""
    ledger = family()
    Quarantine(ledger).give_up(2, "hopeless")
    assert residencies(ledger) == ["resident", "failed", "quarantined", "resident", "resident"]
    assert Quarantine(ledger).give_up(2, "hopeless").pool_ids == ()
