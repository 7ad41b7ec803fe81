"""The whole of what the proxy knows: pools, sessions and request books, changed by one method per happening.

Law: each method takes values and `now`, changes the records at once, and returns the commands that follow. Nothing here waits, so
no decision is ever taken on half-changed records. What follows when the engine comes or goes is in boots.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polykv_proxy.core.attach import Attachment, Wish, decide_attach
from polykv_proxy.core.books import Book, Books, Brought
from polykv_proxy.core.commands import Command, DropCopy, EndSession, ExpirePool, FreeSeq, SavePool
from polykv_proxy.core.events import EngineFacts, EngineSnapshot, SlotEvent, SlotEventKind
from polykv_proxy.core.pools import Pool, PoolCounts, PoolTree, Residency, SavedCopy, SeqRef, with_tokens
from polykv_proxy.core.prefix import Tokens
from polykv_proxy.core.sessions import Session, SessionLedger
from polykv_proxy.errors import ApiError

OVERDUE_S = 1.5
"""A request that its client left before the engine had read it makes no event; its pool is free again within three seconds."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pool's KV was when it was last seen: a sequence of one boot, its first `n_shared` tokens in cells of `base`."""

    boot_id: str
    seq: SeqRef
    cells: int
    base: SeqRef | None = None
    n_shared: int = 0


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    """Bounds: number of pool objects, seconds until an idle session ends, seconds for which a left pool stays anyway."""

    max_pool_objects: int = 1024
    session_ttl_s: float = 600.0
    pool_grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Releasing:
    """What a release did: `running` requests still hold the pool; `detached` names idle sessions that lost it."""

    running: int
    detached: tuple[str, ...]
    commands: tuple[Command, ...]


class Ledger:
    """Pools, sessions and books of one proxy. `first_number` starts both request and session numbers."""

    def __init__(self, limits: LedgerLimits, *, first_number: int = 1, next_pool_id: int = 1) -> None:
        self.limits = limits
        self.first_number = first_number
        self.tree = PoolTree(next_pool_id)
        self.sessions = SessionLedger(first_number)
        self.books = Books()
        self.facts: EngineFacts | None = None
        self.lineage: dict[SeqRef, tuple[SeqRef | None, int]] = {}
        """Of each sequence of this boot, living or gone: whose cells its first tokens are, and how many."""
        self.fallen: set[int] = set()
        """Pools whose KV went with a boot that is over, and which have none again yet."""
        self.condemned: set[SeqRef] = set()
        """Sequences of this boot, living or gone, whose own cells failed a check (quarantine.py)."""
        self._placements: dict[int, Placement] = {}
        self._undecided: set[int] = set()
        self._begun_at: dict[int, Residency] = {}
        self._next_req = first_number

    # -- pools -------------------------------------------------------------------------------------------------------

    def restore(self, pool: Pool, placement: Placement | None) -> None:
        """Enter a pool read from the journal: lost until the engine proves that it still holds it."""
        self.tree.put(pool.displaced(Residency.LOST, "not seen since the proxy started"))
        if placement is not None:
            self._placements[pool.pool_id] = placement

    def begin_pool(self, pool: Pool) -> None:
        """Enter a pool that is being made. Its id and name are taken from now on."""
        self.tree.put(pool)

    def forget_placement(self, pool_id: int) -> None:
        """Its KV is nowhere."""
        self._placements.pop(pool_id, None)

    def begin_rebuild(self, pool_id: int) -> Pool:
        """A pool without KV is being made again."""
        pool = self.tree.get(pool_id)
        assert pool is not None
        assert pool.rebuildable
        self._begun_at[pool_id] = pool.residency
        again = pool.displaced(Residency.MATERIALIZING, "being made again")
        self.tree.put(again)
        return again

    def rebuild_failed(self, pool_id: int, reason: str) -> None:
        """It could not be made again: evicted if it was so, else lost. One that never was made is failed, as before."""
        pool, before = self.tree.get(pool_id), self._begun_at.pop(pool_id, None)
        if pool is not None and pool.residency is Residency.MATERIALIZING:
            self.tree.put(pool.displaced(Residency.EVICTED if before is Residency.EVICTED else Residency.LOST, reason))

    def place(self, pool_id: int, at: Placement, tokens: Tokens | None = None) -> list[Command]:
        """A pool's KV now lies there; `tokens` where they are known only now (snapshots).

        A pool that was released meanwhile gives the sequence back; one whose boot is over is lost.
        """
        pool = self.tree.get(pool_id)
        self._begun_at.pop(pool_id, None)
        if pool is None or pool.residency is not Residency.MATERIALIZING:
            return [FreeSeq(at.seq, at.boot_id)]
        if tokens is not None:
            pool = with_tokens(pool, tokens)
        if self.facts is None or self.facts.boot_id != at.boot_id:
            self.tree.put(pool.displaced(Residency.LOST, "the engine started anew"))
            return []
        self.put_placed(pool, at)
        self._placements[pool_id] = at
        return [SavePool(pool_id)]

    def put_placed(self, pool: Pool, at: Placement) -> None:
        """The engine holds a pool's KV there."""
        self.tree.put(pool.placed(at.seq, at.cells, at.base, at.n_shared))
        self.lineage[at.seq] = (at.base, at.n_shared if at.base else 0)
        self.fallen.discard(pool.pool_id)

    def placement(self, pool_id: int) -> Placement | None:
        """Where the pool's KV was last seen."""
        return self._placements.get(pool_id)

    def fell(self, pool_id: int) -> None:
        """Its KV was in a boot of the engine that is over."""
        pool = self.tree.get(pool_id)
        if pool is not None and pool.residency is Residency.RESIDENT:
            self.tree.put(pool.displaced(Residency.LOST, "the engine started anew"))
        self._placements.pop(pool_id, None)
        self.fallen.add(pool_id)

    def set_copy(self, pool_id: int, copy: SavedCopy | None) -> list[Command]:
        """A copy of a pool's KV lies on disk now, or none any more."""
        pool = self.tree.get(pool_id)
        if pool is None or pool.copy == copy:
            return []
        seen = self._placements.get(pool_id) is not None
        self.tree.put(pool.with_copy(copy, without=Residency.LOST if seen else Residency.EVICTED))
        return [SavePool(pool_id)]

    def begin_release(self, pool_id: int) -> Pool:
        """Mark a pool releasing, so that nothing new attaches; returns the record as it was.

        ApiError 404 for an unknown pool, 409 with children or a pin. `commit_release` or `revert_release` must follow.
        """
        pool = self.tree.get(pool_id)
        if pool is None:
            raise ApiError("pool_not_found", f"there is no pool {pool_id}", param="pool_id")
        if pool.residency is Residency.RELEASING:
            raise ApiError("pool_releasing", f"pool {pool_id} is being released already", param="pool_id")
        if children := self.in_the_way(pool_id):
            message = f"pool {pool_id} has children {children}; release them first, or all that nobody uses with ?recursive=1"
            raise ApiError("pool_has_children", message, param="pool_id", extra={"children": children})
        if pool.pin is not None:
            by = f" by {pool.pin.owner!r}" if pool.pin.owner else ""
            message = f"pool {pool_id} is pinned{by}; unpin it first"
            raise ApiError("pool_pinned", message, param="pool_id", extra={"owner": pool.pin.owner})
        for unmade in self.tree.subtree(pool_id)[1:]:
            self.remove(unmade)
        self.mark_releasing(pool)
        return pool

    def in_the_way(self, pool_id: int) -> list[int]:
        """The children for whose sake a pool is not released: none that could not be made, unless requests wait for it."""
        children = filter(None, map(self.tree.get, self.tree.children(pool_id)))
        return [pool.pool_id for pool in children if not pool.unmade or self.books.of_pool(pool.pool_id)]

    def mark_releasing(self, pool: Pool) -> None:
        """Nothing new attaches from now on; what becomes of it is decided by commit or revert."""
        self.tree.put(replace(pool, residency=Residency.RELEASING))
        self._undecided.add(pool.pool_id)

    def revert_release(self, before: Pool) -> None:
        """The release could not be written down: the pool is what it was."""
        self._undecided.discard(before.pool_id)
        now = self.tree.get(before.pool_id)
        if now is not None and before.seq is not None and now.seq is None:
            self.tree.put(now.displaced(Residency.LOST, "its KV went while it was being released"))
        elif now is not None:
            self.tree.put(replace(now, residency=before.residency))

    def commit_release(self, pool_id: int) -> Releasing:
        """Release for good: at once when nothing runs on it, else when the last book closes. Idle sessions are detached."""
        self._undecided.discard(pool_id)
        running = len(self.books.of_pool(pool_id))
        detached = self._detach_sessions(pool_id, idle_only=running > 0)
        pool = self.tree.get(pool_id)
        commands = [] if pool is None or running else self.remove(pool)
        return Releasing(running, detached, tuple(commands))

    def _detach_sessions(self, pool_id: int, *, idle_only: bool) -> tuple[str, ...]:
        attached = [session for session in self.sessions.of_pool(pool_id) if not (idle_only and session.n_streams)]
        for session in attached:
            self.sessions.put(replace(session, pool_id=None))
        return tuple(sorted(session.session_id for session in attached))

    def remove(self, pool: Pool) -> list[Command]:
        """Forget a pool, give its sequence back and delete its copy."""
        self._detach_sessions(pool.pool_id, idle_only=False)
        placement = self._placements.pop(pool.pool_id, None)
        self.fallen.discard(pool.pool_id)
        self.tree.remove(pool.pool_id)
        free: list[Command] = [FreeSeq(placement.seq, placement.boot_id)] if placement is not None else []
        return [*free, DropCopy(pool.pool_id)] if pool.copy is not None else free

    def lose_seq(self, seq: SeqRef, reason: str) -> None:
        """The engine does not hold this sequence any more: its pool is lost."""
        for pool in self.tree:
            if pool.seq == seq and pool.residency is Residency.RESIDENT:
                self.displace(pool.pool_id, Residency.LOST, reason)

    def restore_terms(self, before: Pool) -> None:
        """A change of a pool's pin or time to live could not be written down: they are what they were."""
        pool = self.tree.get(before.pool_id)
        if pool is not None:
            self.tree.put(replace(pool, pin=before.pin, ttl_s=before.ttl_s))

    def displace(self, pool_id: int, residency: Residency, reason: str) -> Placement | None:
        """Take a pool's KV away in the records: where it was."""
        pool = self.tree.get(pool_id)
        if pool is not None:
            self.tree.put(pool.displaced(residency, reason))
        return self._placements.pop(pool_id, None)

    # -- requests -----------------------------------------------------------------------------------------------------

    def take_req(self) -> int:
        """A request number, never handed out again."""
        self._next_req += 1
        return self._next_req - 1

    def admit(self, req: int, wish: Wish, now: float) -> tuple[Attachment, Session | None]:
        """Decide a request and open its book, so that nothing it needs can go while it waits.

        ApiError refuses it and opens nothing.
        """
        attachment = decide_attach(self.tree, wish)
        pool = attachment.pool
        session = self._enter_session(wish, pool, now)
        number = session.number if session else None
        self.books.open(Book(req, wish.n_tasks, now, pool.pool_id if pool else None, number, request_id=wish.request_id))
        if pool is not None:
            self.tree.put(replace(pool, last_access_ts=now))
        return attachment, session

    def _enter_session(self, wish: Wish, pool: Pool | None, now: float) -> Session | None:
        if wish.session_id is None:
            return None
        session = self.sessions.open(wish.session_id, now)
        if pool is not None and session.pool_id not in {None, pool.pool_id}:
            self._detached(session.pool_id, now)
        pool_id = pool.pool_id if pool else session.pool_id
        entered = replace(session, n_streams=session.n_streams + 1, n_turns=session.n_turns + 1, pool_id=pool_id)
        self.sessions.put(entered)
        return entered

    def engine_event(self, event: SlotEvent, now: float) -> list[Command]:
        """One slot event: books, sessions and counts follow; a releasing pool goes with its last book."""
        change = self.books.note(event)
        if change is None:
            return []
        before, after = change
        if event.kind is SlotEventKind.RELEASED and after.pool_id is not None:
            self._count(after, event)
        self._follow_session(before, after, now)
        return self._when_closed(after, now) if after.closed else []

    def http_done(self, req: int, now: float, *, refused: bool) -> list[Command]:
        """The HTTP exchange of a request is over."""
        change = self.books.http_done(req, now, refused=refused)
        if change is None:
            return []
        before, after = change
        self._follow_session(before, after, now)
        return self._when_closed(after, now) if after.closed else []

    def abandon(self, req: int, now: float) -> list[Command]:
        """A request that never reached the engine is over."""
        book = self.books.close(req)
        if book is None:
            return []
        self._leave_session(book, now)
        return self._when_closed(book, now)

    def settle_overdue(self, snapshot: EngineSnapshot, now: float) -> list[Command]:
        """Close the books whose HTTP ended a while ago and whose request the engine does not run."""
        commands: list[Command] = []
        for book in self.books.overdue(now, OVERDUE_S):
            if book.req not in snapshot.reqs:
                commands += self.abandon(book.req, now)
        return commands

    def _follow_session(self, before: Book, after: Book, now: float) -> None:
        session = self.sessions.by_number(after.session) if after.session is not None else None
        if session is None:
            return
        if after.closed:
            self._leave_session(before, now)
        elif after.active and not before.active:
            self.sessions.put(replace(session, n_active=session.n_active + 1, last_used_ts=now))

    def _leave_session(self, book: Book, now: float) -> None:
        session = self.sessions.by_number(book.session) if book.session is not None else None
        if session is not None:
            active = session.n_active - (1 if book.active else 0)
            self.sessions.put(replace(session, n_streams=session.n_streams - 1, n_active=active, last_used_ts=now))

    def _count(self, book: Book, event: SlotEvent) -> None:
        pool_id = book.pool_id
        pool = self.tree.get(pool_id) if pool_id is not None else None
        if pool is None or pool_id is None:
            return
        n_shared = 0 if book.brought is Brought.REBUILT else event.n_shared
        counts = PoolCounts(
            pool.counts.n_queries + 1,
            pool.counts.n_hits + (1 if n_shared else 0),
            pool.counts.n_tokens_shared + n_shared,
            pool.counts.n_rebuilds + (1 if book.brought is Brought.REBUILT and event.n_shared else 0),
            pool.counts.n_restores + (1 if book.brought is Brought.RESTORED and event.n_shared else 0),
        )
        self.tree.put(replace(pool, counts=counts))
        if event.miss == "stale_seq" and event.seq is not None and pool.seq == event.seq and pool.residency is Residency.RESIDENT:
            self._placements.pop(pool_id, None)
            self.tree.put(replace(pool, counts=counts).displaced(Residency.LOST, "the engine no longer holds its sequence"))

    def move_session(self, session: Session, pool_id: int, now: float) -> None:
        """A session belongs to another pool from now on; its running requests stay in their books."""
        self._detached(session.pool_id, now)
        self.sessions.put(replace(session, pool_id=pool_id))

    def _detached(self, pool_id: int | None, now: float) -> None:
        """Somebody left a pool: it, and all above it, were in use until now."""
        pool = self.tree.get(pool_id) if pool_id is not None else None
        if pool is not None:
            for left in (pool, *self.tree.ancestors(pool.pool_id)):
                self.tree.put(replace(left, detached_ts=now))

    def _when_closed(self, book: Book, now: float) -> list[Command]:
        self._detached(book.pool_id, now)
        pool = self.tree.get(book.pool_id) if book.pool_id is not None else None
        if pool is None or pool.residency is not Residency.RELEASING:
            return []
        if pool.pool_id in self._undecided or self.books.of_pool(pool.pool_id):
            return []
        return self.remove(pool)

    # -- sessions and time --------------------------------------------------------------------------------------------

    def end_session(self, session_id: str, now: float) -> Session:
        """Forget a session; its requests' books close on the engine's events. ApiError 404 for an unknown one."""
        session = self.sessions.end(session_id)
        if session is None:
            raise ApiError("session_not_found", f"there is no session {session_id!r}; GET /polykv/sessions lists those there are")
        self._detached(session.pool_id, now)
        return session

    def sweep(self, now: float) -> list[Command]:
        """What time alone ends: idle sessions, and unused pools with a `ttl_s`."""
        self._not_after(now)
        commands: list[Command] = []
        for session in self.sessions.expired(now, self.limits.session_ttl_s):
            self.end_session(session.session_id, now)
            commands.append(EndSession(session.number))
        commands += [ExpirePool(pool.pool_id) for pool in self.tree if self._pool_expired(pool, now)]
        return commands

    def _not_after(self, now: float) -> None:
        """A clock may have been set back: what was used, or has ended, after now has done so now, and time goes on from here."""
        self.books.not_after(now)
        for session in self.sessions:
            if session.last_used_ts > now:
                self.sessions.put(replace(session, last_used_ts=now))
        for pool in list(self.tree):
            if pool.last_used_ts > now:
                left_ts = None if pool.detached_ts is None else min(now, pool.detached_ts)
                self.tree.put(replace(pool, last_access_ts=min(now, pool.last_access_ts), detached_ts=left_ts))

    def expired(self, pool_id: int, now: float) -> bool:
        """Is a pool's time to live over, now that its release is at hand?"""
        pool = self.tree.get(pool_id)
        return pool is not None and self._pool_expired(pool, now)

    def _pool_expired(self, pool: Pool, now: float) -> bool:
        if pool.ttl_s is None or pool.pin is not None or now - pool.last_used_ts < pool.ttl_s:
            return False
        if pool.residency in {Residency.MATERIALIZING, Residency.RELEASING} or self.in_the_way(pool.pool_id):
            return False
        return not self.books.of_pool(pool.pool_id) and not self.sessions.of_pool(pool.pool_id)
