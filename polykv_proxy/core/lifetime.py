"""How long pools live: pins, leases, use, eviction and release of whole subtrees, over one ledger.

Law: each method looks at everything that uses a pool and changes the records in the same turn. Requests, attached sessions and
materialisations are never broken: what is used is refused with the names of its users.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

from polykv_proxy.core.commands import Command, FreeSeq, SavePool
from polykv_proxy.core.ledger import Ledger, Releasing
from polykv_proxy.core.ownership import Holder, owned_tokens
from polykv_proxy.core.pools import Pin, Pool, Residency, SeqRef
from polykv_proxy.core.retention import Candidate, Keep, choose, leaving
from polykv_proxy.errors import ApiError

WITH_KV = frozenset({Residency.RESIDENT, Residency.MATERIALIZING, Residency.RELEASING})


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush did: pools evicted, leaf first, and why others stayed."""

    evicted: tuple[int, ...]
    kept: dict[int, Keep]
    commands: tuple[Command, ...]


class Uses:
    """Who uses which pool at this moment."""

    def __init__(self, ledger: Ledger) -> None:
        self._tree = ledger.tree
        self.running = Counter(book.pool_id for book in ledger.books if book.pool_id is not None)
        self.sessions: defaultdict[int, list[str]] = defaultdict(list)
        for session in ledger.sessions:
            if session.pool_id is not None:
                self.sessions[session.pool_id].append(session.session_id)
        self._below: set[int] = set()
        making = [pool.pool_id for pool in self._tree if pool.residency is Residency.MATERIALIZING]
        for pool_id in {*self.running, *self.sessions, *making}:
            if self._tree.get(pool_id) is not None:
                self._below.update(pool.pool_id for pool in self._tree.ancestors(pool_id))

    def below(self, pool_id: int) -> bool:
        """Is anything attached to, running on, or being made below the pool?"""
        return pool_id in self._below

    def resident_children(self, pool_id: int) -> list[int]:
        """Children that hold KV or are about to."""
        children = (self._tree.get(child) for child in self._tree.children(pool_id))
        return [child.pool_id for child in children if child is not None and child.residency in WITH_KV]

    def keep(self, pool: Pool) -> Keep | None:
        """What keeps a pool's KV, whoever asks; the first of the reasons."""
        if pool.residency is Residency.MATERIALIZING:
            return Keep.MATERIALIZING
        if self.running[pool.pool_id]:
            return Keep.RUNNING
        if self.sessions.get(pool.pool_id):
            return Keep.ATTACHED
        if pool.pin is not None:
            return Keep.PINNED
        if self.below(pool.pool_id):
            return Keep.BELOW
        return Keep.CHILDREN if self.resident_children(pool.pool_id) else None


class Lifetime:
    """The verbs. Times are Unix seconds."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tree = ledger.tree

    # -- pins and leases ----------------------------------------------------------------------------------------------

    def pin(self, pool_id: int, owner: str | None, lease_s: float | None, now: float) -> list[Command]:
        """Keep a pool's KV when nobody uses it, for `lease_s` seconds or, with None, until it is unpinned."""
        pool = self._living(pool_id)
        until = None if lease_s is None else now + lease_s
        self._tree.put(replace(pool, pin=Pin(owner, until)))
        return [SavePool(pool_id)]

    def unpin(self, pool_id: int, owner: str | None) -> list[Command]:
        """Take the pin away; fine without one. ApiError 409 when it is named as another's."""
        pool = self._living(pool_id)
        if pool.pin is not None and owner is not None and pool.pin.owner != owner:
            holder = "nobody by name" if pool.pin.owner is None else repr(pool.pin.owner)
            raise ApiError(
                "pool_pinned",
                f"pool {pool_id} is pinned by {holder}, not by {owner!r}; without owner unpin takes any pin away",
                param="owner",
                extra={"owner": pool.pin.owner},
            )
        self._tree.put(replace(pool, pin=None))
        return [SavePool(pool_id)]

    def renew(self, pool_id: int, ttl_s: float | None, now: float) -> list[Command]:
        """Count the pool's time to live from now; `ttl_s` None leaves it as long as it was."""
        return self.set_ttl(pool_id, self._living(pool_id).ttl_s if ttl_s is None else ttl_s, now)

    def set_ttl(self, pool_id: int, ttl_s: float | None, now: float) -> list[Command]:
        """Give the pool a time to live that counts from now, or none."""
        self._tree.put(replace(self._living(pool_id), last_access_ts=now, ttl_s=ttl_s))
        return [SavePool(pool_id)]

    def end_leases(self, now: float) -> list[Command]:
        """Take away the pins whose lease is over."""
        ended = [pool for pool in self._tree if pool.pin is not None and pool.pin.until_ts is not None and now >= pool.pin.until_ts]
        for pool in ended:
            self._tree.put(replace(pool, pin=None))
        return [SavePool(pool.pool_id) for pool in ended]

    def _living(self, pool_id: int) -> Pool:
        pool = self._tree.get(pool_id)
        if pool is None:
            raise ApiError("pool_not_found", f"there is no pool {pool_id}", param="pool_id")
        if pool.residency is Residency.RELEASING:
            raise ApiError("pool_releasing", f"pool {pool_id} is being released", param="pool_id")
        return pool

    # -- eviction -------------------------------------------------------------------------------------------------------

    def evict(self, pool_id: int) -> list[Command]:
        """Drop a pool's KV and keep its tokens; nothing to do without KV. ApiError 409 while anything keeps it."""
        pool = self.evictable(pool_id)
        return self._evict(pool, "evicted on request") if pool.seq is not None else []

    def evictable(self, pool_id: int) -> Pool:
        """The pool, when nothing keeps its KV. ApiError 409 names what does."""
        pool = self._living(pool_id)
        uses = Uses(self._ledger)
        children = uses.resident_children(pool_id)
        keep = uses.keep(pool)
        if children and keep in {Keep.BELOW, Keep.CHILDREN}:
            message = f"pool {pool_id} has children with KV: {children}; flush evicts an idle subtree, leaf first"
            raise ApiError("pool_has_children", message, param="pool_id", extra={"children": children})
        if keep is not None:
            raise _kept(pool, keep, uses)
        return pool

    def idle(self, pool_id: int) -> list[int]:
        """The pools of a subtree that nobody uses or has pinned, leaf first."""
        uses = Uses(self._ledger)
        subtree = reversed(self._tree.subtree(self._living(pool_id).pool_id))
        return [pool.pool_id for pool in subtree if pool.seq is not None and uses.keep(pool) in {None, Keep.CHILDREN}]

    def flush(self, pool_id: int) -> Flushed:
        """Evict what is idle of a pool and all below it, leaf first."""
        self._living(pool_id)
        evicted: list[int] = []
        kept: dict[int, Keep] = {}
        commands: list[Command] = []
        for pool in reversed(self._tree.subtree(pool_id)):
            if pool.residency not in WITH_KV or pool.residency is Residency.RELEASING:
                continue
            keep = Uses(self._ledger).keep(pool)
            if keep is not None:
                kept[pool.pool_id] = keep
                continue
            commands += self._evict(pool, "flushed on request")
            evicted.append(pool.pool_id)
        return Flushed(tuple(evicted), dict(sorted(kept.items())), tuple(commands))

    def candidates(self, now: float, spare: Set[int] = frozenset()) -> list[Candidate]:
        """All pools with KV, each with what keeps it from leaving by itself; those in `spare` stay as if just left."""
        uses = Uses(self._ledger)
        resident = [pool for pool in self._tree if pool.seq is not None]
        owned = owned_tokens([_holder(pool) for pool in resident], self._ledger.lineage)
        found = []
        for pool, own in zip(resident, owned, strict=True):
            keep = self._auto_keep(pool, uses, now, spared=pool.pool_id in spare)
            found.append(Candidate(pool.pool_id, pool.parent, own, max(0.0, now - pool.last_used_ts), keep))
        return found

    def _auto_keep(self, pool: Pool, uses: Uses, now: float, *, spared: bool) -> Keep | None:
        keep = Keep.RUNNING if pool.residency is Residency.RELEASING else uses.keep(pool)
        fresh = spared or (pool.detached_ts is not None and now - pool.detached_ts < self._ledger.limits.pool_grace_s)
        return Keep.GRACE if fresh and keep in {None, Keep.CHILDREN} else keep

    def grace_left_s(self, now: float) -> float | None:
        """Seconds until the first pool may leave that nothing keeps but its last user having left just now; None without one."""
        uses, grace = Uses(self._ledger), self._ledger.limits.pool_grace_s
        resident = [pool for pool in self._tree if pool.residency is Residency.RESIDENT and uses.keep(pool) is None]
        left = [grace - (now - pool.detached_ts) for pool in resident if pool.detached_ts is not None]
        return min((seconds for seconds in left if seconds > 0), default=None)

    def leaving(self, now: float, *, n_ids: int = 0, n_cells: int = 0, spare: Set[int] = frozenset()) -> list[int]:
        """The idle pools that would be evicted for that, leaf first."""
        return [candidate.pool_id for candidate in choose(self.candidates(now, spare), n_ids=n_ids, n_cells=n_cells)]

    def retire(
        self, now: float, *, n_ids: int = 0, n_cells: int = 0, spare: Set[int] = frozenset()
    ) -> tuple[list[int], list[Command]]:
        """Evict as many idle pools as that needs: their ids, leaf first, and what follows. Nothing when it cannot be had."""
        chosen = self.leaving(now, n_ids=n_ids, n_cells=n_cells, spare=spare)
        commands: list[Command] = []
        for pool_id in chosen:
            pool = self._tree.get(pool_id)
            assert pool is not None
            commands += self._evict(pool, "evicted to make room")
        return chosen, commands

    def expendable(self, now: float, spare: Set[int] = frozenset()) -> list[SeqRef]:
        """The sequences of all pools that may leave, in the order in which they would."""
        pools = (self._tree.get(candidate.pool_id) for candidate in leaving(self.candidates(now, spare)))
        return [pool.seq for pool in pools if pool is not None and pool.seq is not None]

    def given_up(self, seq: SeqRef) -> list[Command]:
        """The engine gave up a sequence for want of cells. Nothing follows when it is no resident pool's."""
        pool = next((pool for pool in self._tree if pool.seq == seq and pool.residency is Residency.RESIDENT), None)
        if pool is None:
            return []
        self._ledger.displace(pool.pool_id, Residency.EVICTED, "the engine had no cells left for a request")
        return [SavePool(pool.pool_id)]

    def _evict(self, pool: Pool, reason: str) -> list[Command]:
        assert pool.seq is not None
        placement = self._ledger.displace(pool.pool_id, Residency.EVICTED, reason)
        free: list[Command] = [FreeSeq(placement.seq, placement.boot_id)] if placement is not None else []
        return [*free, SavePool(pool.pool_id)]

    # -- compaction -----------------------------------------------------------------------------------------------------

    def migrate(self, session_ids: Iterable[str], pool_id: int, now: float) -> tuple[str, ...]:
        """Attach sessions to another pool; those that have ended meanwhile are left out. Requests that run stay where they are."""
        moved = []
        for session_id in session_ids:
            session = self._ledger.sessions.get(session_id)
            if session is not None:
                self._ledger.move_session(session, pool_id, now)
                moved.append(session_id)
        return tuple(moved)

    def retire_when_unused(self, pool_id: int) -> list[Pool]:
        """Let a pool and all below it go as soon as nobody uses them, leaf first: a time to live of nothing. The new records."""
        retiring = [replace(pool, ttl_s=0.0) for pool in self._tree.subtree(pool_id) if pool.residency is not Residency.RELEASING]
        for pool in retiring:
            self._tree.put(pool)
        return retiring

    # -- release of a subtree -------------------------------------------------------------------------------------------

    def begin_release_tree(self, pool_id: int, *, over_pins: bool = False) -> list[Pool]:
        """Mark a pool and all below it releasing; the records as they were, leaf first. ApiError 409 while anybody uses one."""
        self._living(pool_id)
        uses = Uses(self._ledger)
        subtree = list(reversed(self._tree.subtree(pool_id)))
        for pool in subtree:
            keep = Keep.RUNNING if pool.residency is Residency.RELEASING else uses.keep(pool)
            if keep in {Keep.RUNNING, Keep.ATTACHED, Keep.MATERIALIZING} or (pool.pin is not None and not over_pins):
                raise _kept(pool, Keep.PINNED if pool.pin is not None and keep not in _USED else keep, uses)
        for pool in subtree:
            self._ledger.mark_releasing(pool)
        return subtree

    def revert_release_tree(self, before: Iterable[Pool]) -> None:
        """The release could not be written down: all are what they were."""
        for pool in before:
            self._ledger.revert_release(pool)

    def commit_release_tree(self, before: Iterable[Pool]) -> list[Releasing]:
        """Release them for good, leaf first."""
        return [self._ledger.commit_release(pool.pool_id) for pool in before]


_USED = frozenset({Keep.RUNNING, Keep.ATTACHED, Keep.MATERIALIZING})


def _holder(pool: Pool) -> Holder:
    return Holder(pool.seq, pool.base, pool.n_shared, pool.prefix_len)


def _kept(pool: Pool, keep: Keep | None, uses: Uses) -> ApiError:
    """409: what uses the pool, by name."""
    n_running, sessions = uses.running[pool.pool_id], sorted(uses.sessions.get(pool.pool_id, ()))
    if keep is Keep.PINNED:
        owner = pool.pin.owner if pool.pin is not None else None
        by = f" by {owner!r}" if owner else ""
        return ApiError(
            "pool_pinned", f"pool {pool.pool_id} is pinned{by}; unpin it first", param="pool_id", extra={"owner": owner}
        )
    what = {
        Keep.RUNNING: f"{n_running} requests run on it",
        Keep.ATTACHED: f"sessions {sessions} are attached to it",
        Keep.MATERIALIZING: "it is being made",
    }.get(keep or Keep.BELOW, "something below it is in use")
    return ApiError(
        "pool_busy",
        f"pool {pool.pool_id} is in use: {what}",
        param="pool_id",
        extra={"pool_id": pool.pool_id, "n_running": n_running, "sessions": sessions},
    )
