"""Whose cells are whose: each cell in use is counted once, for exactly one holder.

Law: pure. A cell that several hold belongs to the sequence that made it; when that one is gone, to the first holder that is left.
So the sum over all holders is what the engine has in use (on plain attention, at rest).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from polykv_proxy.core.pools import SeqRef

Lineage: TypeAlias = Mapping[SeqRef, tuple[SeqRef | None, int]]
"""Of a sequence, living or gone: whose cells its first tokens are, and how many."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Holds `n_tokens` cells, the first `n_shared` of them those of `base`. `ref` is its own name; slots have none."""

    ref: SeqRef | None
    base: SeqRef | None
    n_shared: int
    n_tokens: int


def owned_tokens(holders: Sequence[Holder], lineage: Lineage) -> list[int]:
    """How many cells belong to each holder, in the order given."""
    living = {holder.ref for holder in holders if holder.ref is not None}
    covered: dict[SeqRef, int] = {}
    owned = []
    for holder in holders:
        shared = min(holder.n_shared, holder.n_tokens) if holder.base is not None else 0
        own = holder.n_tokens - shared
        base = holder.base
        while base is not None and shared > 0:
            below, start = lineage.get(base, (None, 0))
            start = min(start, shared) if below is not None else 0
            if base not in living:
                done = max(start, covered.get(base, start))
                own += max(0, shared - done)
                covered[base] = max(done, shared)
            base, shared = below, start
        owned.append(own)
    return owned
