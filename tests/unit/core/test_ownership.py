"""Mirrors core/ownership.py: against cells as things, in random histories of pools and slots."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.ownership import Holder, owned_tokens
from polykv_proxy.core.pools import SeqRef

STEPS = st.lists(st.tuples(st.sampled_from("mmaasfcg"), st.integers(0, 9), st.integers(0, 60), st.integers(1, 60)), max_size=40)


@dataclass
class Thing:
    """A pool or a slot with its very cells, and what the engine says of them."""

    ref: SeqRef | None
    cells: list[int]
    base: SeqRef | None = None
    n_shared: int = 0


@dataclass
class Cache:
    """The naive model."""

    pools: list[Thing] = field(default_factory=list)
    slots: list[Thing] = field(default_factory=list)
    lineage: dict[SeqRef, tuple[SeqRef | None, int]] = field(default_factory=dict)
    n_cells: int = 0
    n_refs: int = 0

    def new(self, n: int) -> list[int]:
        self.n_cells += n
        return list(range(self.n_cells - n, self.n_cells))

    def step(self, kind: str, pick: int, at: int, n: int) -> None:
        pool = self.pools[pick % len(self.pools)] if self.pools else None
        slot = self.slots[pick % len(self.slots)] if self.slots else None
        shared = min(at, len(pool.cells)) if pool else 0
        held = pool.cells[:shared] if pool else []
        base = pool.ref if pool and shared else None
        if kind == "m":
            self.enter(Thing(None, held + self.new(n), base, shared))
        elif kind == "a":
            self.slots.append(Thing(None, held + self.new(n), base, shared))
        elif kind == "s" and slot and min(at, len(slot.cells)):
            n = min(at, len(slot.cells))
            made = self.enter(Thing(None, slot.cells[:n], slot.base, min(n, slot.n_shared)))
            if n > slot.n_shared:
                slot.base, slot.n_shared = made.ref, n
        elif kind == "f" and pool:
            self.pools.remove(pool)
        elif kind == "c" and slot:
            self.slots.remove(slot)
        elif kind == "g" and slot:
            slot.cells += self.new(n)

    def enter(self, thing: Thing) -> Thing:
        self.n_refs += 1
        thing.ref = SeqRef(self.n_refs % 5, self.n_refs)
        thing.base = thing.base if thing.n_shared else None
        self.lineage[thing.ref] = (thing.base, thing.n_shared)
        self.pools.append(thing)
        return thing


@given(STEPS)
def test_every_cell_in_use_is_counted_once(steps: list[tuple[str, int, int, int]]) -> None:
    """After each step the sum over all holders is the number of different cells they hold, and no part is negative."""
    cache = Cache()
    for step in steps:
        cache.step(*step)
        things = cache.pools + cache.slots
        owned = owned_tokens([Holder(t.ref, t.base, t.n_shared, len(t.cells)) for t in things], cache.lineage)
        assert all(own >= 0 for own in owned)
        assert sum(owned) == len({cell for thing in things for cell in thing.cells})


def test_a_living_base_owns_what_it_shares() -> None:
    """A child and a slot own what lies beyond the pool they share; when it is gone the first of them owns its cells too."""
    root, child = SeqRef(4, 1), SeqRef(5, 1)
    lineage = {root: (None, 0), child: (root, 30)}
    pools = [Holder(root, None, 0, 40), Holder(child, root, 30, 50)]
    slot = Holder(None, child, 45, 60)
    assert owned_tokens([*pools, slot], lineage) == [40, 20, 15]
    assert owned_tokens([pools[1], slot], lineage) == [50, 15]
    assert owned_tokens([slot], lineage) == [60]
    assert owned_tokens([pools[0], slot, slot], lineage) == [40, 30, 15]
