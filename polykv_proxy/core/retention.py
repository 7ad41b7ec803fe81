"""Which pools give up their KV when sequence ids or cells run out.

Law: pure. What is kept never leaves, and a parent never before its children. Of the rest the one with the longest idle time per
token that a rebuild would compute goes first: least recently used, weighted by the cost to bring it back. Nothing leaves in vain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Keep(StrEnum):
    """Why a pool's KV stays. A metric label and a word of the API."""

    RUNNING = "running"
    ATTACHED = "attached"
    MATERIALIZING = "materializing"
    CHILDREN = "children"
    BELOW = "in_use_below"
    PINNED = "pinned"
    GRACE = "grace"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pool with KV. `own_tokens` are its cells that no other pool has, which a rebuild computes again. `idle_s` is at least 0."""

    pool_id: int
    parent: int | None
    own_tokens: int
    idle_s: float
    keep: Keep | None = None


def rank(candidate: Candidate) -> tuple[float, int]:
    """The smaller, the sooner it leaves: idle seconds per token to compute again, then the older pool."""
    return -(candidate.idle_s / max(1, candidate.own_tokens)), candidate.pool_id


def choose(candidates: Iterable[Candidate], *, n_ids: int = 0, n_cells: int = 0) -> list[Candidate]:
    """The pools to evict, in order, so that `n_ids` sequence ids and `n_cells` cells come free; empty when that cannot be had.

    A parent is a candidate once its last child was chosen: keep `CHILDREN` then no longer holds it.
    """
    order = leaving(candidates)
    chosen: list[Candidate] = []
    while len(chosen) < n_ids or sum(gone.own_tokens for gone in chosen) < n_cells:
        following = next(order, None)
        if following is None:
            return []
        chosen.append(following)
    return chosen


def leaving(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """All that may leave, in the order in which they would."""
    resident = {candidate.pool_id: candidate for candidate in candidates}
    while True:
        parents = {candidate.parent for candidate in resident.values()}
        free = [c for c in resident.values() if c.keep in {None, Keep.CHILDREN} and c.pool_id not in parents]
        if not free:
            return
        yield resident.pop(min(free, key=rank).pool_id)
