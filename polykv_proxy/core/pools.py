"""Pool records: what a pool is, what its name may look like, and which changes of its residency exist.

Law: records are immutable values; `PoolTree` holds them and hands out new ones. A pool id is never used twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from polykv_proxy.core.prefix import Match, PrefixHash, PrefixIndex, Tokens, hash_prefix

NAME_RULE = "[a-z_][a-z0-9_.-]{0,63}"
_NAME = re.compile(NAME_RULE)
_ID = re.compile(r"[0-9]{1,18}")


class Residency(StrEnum):
    """Where a pool's KV is. Only `resident` has KV in the engine's cache."""

    MATERIALIZING = "materializing"
    RESIDENT = "resident"
    SAVED = "saved"
    EVICTED = "evicted"
    LOST = "lost"
    RELEASING = "releasing"
    QUARANTINED = "quarantined"
    FAILED = "failed"


_DORMANT = frozenset({Residency.SAVED, Residency.EVICTED, Residency.LOST})
"""Without KV, and nothing wrong: `saved` exactly where there is a copy."""
REBUILDABLE = _DORMANT | {Residency.QUARANTINED}
"""Residencies from which the next attach rebuilds a pool that was made."""


@dataclass(frozen=True, slots=True, order=True)
class SeqRef:
    """A sequence of the engine: its id and which allocation of that id."""

    seq: int
    gen: int

    def __str__(self) -> str:
        return f"{self.seq}.{self.gen}"

    @classmethod
    def parse(cls, text: str) -> SeqRef:
        """From `"5.3"`. ValueError for anything else."""
        seq, dot, gen = text.partition(".")
        if not (dot and seq.isdecimal() and gen.isdecimal()):
            raise ValueError(f"not a sequence: {text!r}; expected seq.gen")
        return cls(int(seq), int(gen))


@dataclass(frozen=True, slots=True)
class Pin:
    """Why a pool stays resident when nobody uses it. `until_ts` is the end of the lease in Unix seconds, None without one."""

    owner: str | None
    until_ts: float | None


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """What the engine reported about requests that named the pool. One for which it was rebuilt is no hit and saved nothing; one
    for which its KV was read from disk computed none of it and is a hit.
    """

    n_queries: int = 0
    n_hits: int = 0
    n_tokens_shared: int = 0
    n_rebuilds: int = 0
    n_restores: int = 0


@dataclass(frozen=True, slots=True)
class SavedCopy:
    """A file with the KV of `[start, L)`. With a `start` above 0 the parent's KV gives the rest."""

    n_bytes: int
    start: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A pool was never made: its record goes at `until_ts` (Unix seconds). `lasting`: another try would fail as well."""

    until_ts: float
    lasting: bool


class Verdict(StrEnum):
    """What a self-check found."""

    OK = "ok"
    MISMATCH = "mismatch"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class PoolChecks:
    """The self-checks of a pool since the proxy was started. `last_ts` and `last` are of the last one that was conclusive."""

    n_checks: int = 0
    n_mismatches: int = 0
    last_ts: float | None = None
    last: Verdict | None = None

    def after(self, verdict: Verdict, now: float) -> PoolChecks:
        """With one more."""
        if verdict is Verdict.INCONCLUSIVE:
            return replace(self, n_checks=self.n_checks + 1)
        return PoolChecks(self.n_checks + 1, self.n_mismatches + (verdict is Verdict.MISMATCH), now, verdict)


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """A shared prefix `[0, L)`: names, tokens, and where its KV is.

    `seq` is set exactly while there is KV (resident, and releasing from there). `reason` says why a pool is lost or failed. The
    parent holds `[0, branch_pos)`; a root has no parent and branches at 0. Of the KV `[0, n_shared)` are cells of `base`, the rest
    are its own. `detached_ts`: when the last user of it or of anything below left. `failure` is set from the first failure to make
    it until it is made. Times are Unix seconds.
    """

    pool_id: int
    tokens: Tokens
    hashed: PrefixHash
    residency: Residency
    fingerprint: str
    created_ts: float
    last_access_ts: float
    name: str | None = None
    parent: int | None = None
    branch_pos: int = 0
    source: str = "tokens"
    ttl_s: float | None = None
    seq: SeqRef | None = None
    cells: int = 0
    base: SeqRef | None = None
    n_shared: int = 0
    copy: SavedCopy | None = None
    pin: Pin | None = None
    detached_ts: float | None = None
    failure: Failure | None = None
    reason: str | None = None
    counts: PoolCounts = field(default_factory=PoolCounts)
    checks: PoolChecks = field(default_factory=PoolChecks)

    @property
    def prefix_len(self) -> int:
        """L, in tokens."""
        return int(self.tokens.size)

    @property
    def last_used_ts(self) -> float:
        """When a request last took it up, or the last user of it or of anything below left."""
        return max(self.last_access_ts, self.detached_ts or 0.0)

    @property
    def own_tokens(self) -> Tokens:
        """The tokens `[branch_pos, L)` that the parent does not have."""
        return self.tokens[self.branch_pos :]

    @property
    def unmade(self) -> bool:
        """Was it promised, and could not be made?"""
        return self.failure is not None and self.residency is Residency.FAILED

    @property
    def rebuildable(self) -> bool:
        """Does the next request that names it bring its KV?"""
        return self.residency in REBUILDABLE or (self.unmade and self.failure is not None and not self.failure.lasting)

    def placed(self, seq: SeqRef, cells: int, base: SeqRef | None = None, n_shared: int = 0) -> Pool:
        """This pool with KV in the engine, the first `n_shared` tokens in cells of `base`."""
        n_shared = n_shared if base else 0
        return replace(
            self, residency=Residency.RESIDENT, seq=seq, cells=cells, base=base, n_shared=n_shared, failure=None, reason=None
        )

    def displaced(self, residency: Residency, reason: str) -> Pool:
        """This pool without KV in the engine. Not evicted or lost, but `saved` with a copy, `failed` if it was never made."""
        if self.failure is not None and residency in _DORMANT:
            residency = Residency.FAILED
        elif self.copy is not None and residency in _DORMANT:
            residency = Residency.SAVED
        return replace(self, residency=residency, seq=None, cells=0, base=None, n_shared=0, reason=reason)

    def with_copy(self, copy: SavedCopy | None, without: Residency) -> Pool:
        """This pool with a copy on disk, or with none any more: `without` is what it is then, if it was `saved`."""
        residency = self.residency
        if residency in _DORMANT and copy is not None:
            residency = Residency.SAVED
        elif residency is Residency.SAVED:
            residency = without
        return replace(self, copy=copy, residency=residency)


def valid_name(name: str) -> bool:
    """Does the name follow the rule? Never all digits, by its first character."""
    return _NAME.fullmatch(name) is not None


def is_pool_number(text: str) -> bool:
    """Is it a pool id written as digits?"""
    return _ID.fullmatch(text) is not None


class PoolTree:
    """All pools by id and by name, and the index over their prefixes."""

    def __init__(self, next_id: int = 1) -> None:
        self._pools: dict[int, Pool] = {}
        self._names: dict[str, int] = {}
        self._children: dict[int, set[int]] = {}
        self._index = PrefixIndex()
        self._next_id = next_id
        self.listeners: list[Callable[[Pool | None, Pool | None], None]] = []
        """Told of each record before and after; None for what was not, or is no more."""

    def __iter__(self) -> Iterator[Pool]:
        return iter(sorted(self._pools.values(), key=lambda pool: pool.pool_id))

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def next_id(self) -> int:
        """The id that the next new pool gets."""
        return self._next_id

    def take_id(self) -> int:
        """A new id, never handed out again."""
        self._next_id += 1
        return self._next_id - 1

    def get(self, pool_id: int) -> Pool | None:
        """The pool with this id."""
        return self._pools.get(pool_id)

    def named(self, name: str) -> Pool | None:
        """The pool with this name."""
        pool_id = self._names.get(name)
        return None if pool_id is None else self._pools[pool_id]

    def find(self, key: str | int) -> Pool | None:
        """A pool by id, digit string or name."""
        if isinstance(key, int):
            return self.get(key)
        return self.get(int(key)) if is_pool_number(key) else self.named(key)

    def children(self, pool_id: int) -> list[int]:
        """Ids of the pools branched from this one, ascending."""
        return sorted(self._children.get(pool_id, ()))

    def subtree(self, pool_id: int) -> list[Pool]:
        """The pool and all below it, parents before their children, siblings by id."""
        found: list[Pool] = []
        open_ids = [pool_id]
        while open_ids:
            found.append(self._pools[open_ids.pop()])
            open_ids += reversed(self.children(found[-1].pool_id))
        return found

    def ancestors(self, pool_id: int) -> list[Pool]:
        """Its parent, the parent of that, and so on to the root."""
        found: list[Pool] = []
        parent = self._pools[pool_id].parent
        while parent is not None:
            found.append(self._pools[parent])
            parent = self._pools[parent].parent
        return found

    def levels(self) -> dict[int, int]:
        """The level of each pool: 1 for roots, one more than its parent's for others."""
        levels: dict[int, int] = {}
        for pool in self:
            levels[pool.pool_id] = levels.get(pool.parent or 0, 0) + 1
        return levels

    def depth(self) -> int:
        """Longest chain of parents, in pools; 0 without pools."""
        return max(self.levels().values(), default=0)

    def put(self, pool: Pool) -> None:
        """Enter or replace a pool. Ids of entered pools are never handed out again."""
        before = self._pools.get(pool.pool_id)
        assert pool.name is None or self._names.get(pool.name, pool.pool_id) == pool.pool_id, "two pools of one name"
        assert pool.parent is None or pool.parent in self._pools, "a parent outlives its children"
        assert before is None or before.parent == pool.parent, "a pool never moves"
        self._pools[pool.pool_id] = pool
        if before is not None and before.name is not None and before.name != pool.name:
            del self._names[before.name]
        if pool.parent is not None:
            self._children.setdefault(pool.parent, set()).add(pool.pool_id)
        self._next_id = max(self._next_id, pool.pool_id + 1)
        if pool.name is not None:
            self._names[pool.name] = pool.pool_id
        if before is None or before.hashed.whole != pool.hashed.whole or before.prefix_len != pool.prefix_len:
            self._index.add(pool.pool_id, pool.tokens, pool.hashed)
        for listener in self.listeners:
            listener(before, pool)

    def remove(self, pool_id: int) -> None:
        """Forget a leaf pool and its name; unknown ids are fine."""
        assert not self.children(pool_id), "release children first"
        pool = self._pools.pop(pool_id, None)
        if pool is None:
            return
        self._index.discard(pool_id)
        self._children.pop(pool_id, None)
        if pool.parent is not None:
            self._children[pool.parent].discard(pool_id)
        if pool.name is not None:
            del self._names[pool.name]
        for listener in self.listeners:
            listener(pool, None)

    def match(self, tokens: Tokens) -> Match | None:
        """The pool with the longest common prefix (its id as key)."""
        return self._index.match(tokens)


def with_tokens(pool: Pool, tokens: Tokens) -> Pool:
    """A pool whose tokens became known only when it was made (snapshots)."""
    return replace(pool, tokens=tokens, hashed=hash_prefix(tokens))
