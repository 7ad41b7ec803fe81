"""The lives of a pool tree, as a Hypothesis state machine: what its calls do to the core, judged by plain rules.

Law: the core decides, the machine's engine obeys; here that is a naive model of cells, in tests/engine the real one beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polykv_proxy.core.attach import Course, Wish
from polykv_proxy.core.boots import Boots
from polykv_proxy.core.branch import branch_position
from polykv_proxy.core.commands import DropCopy, FreeSeq
from polykv_proxy.core.events import EngineFacts, EngineSnapshot, SlotEvent, SlotEventKind
from polykv_proxy.core.ledger import Ledger, LedgerLimits, Placement
from polykv_proxy.core.lifetime import Lifetime
from polykv_proxy.core.ownership import Holder, owned_tokens
from polykv_proxy.core.pools import REBUILDABLE, Pool, Residency, SavedCopy, SeqRef
from polykv_proxy.core.prefix import as_tokens, common_prefix, hash_prefix
from polykv_proxy.core.retention import Keep, choose
from polykv_proxy.errors import ApiError

CLIENTS = [f"client-{n}" for n in range(8)]
N_IDS = 6
PICK = st.integers(0, 30)


@dataclass
class SlotCells:
    """A slot: the tokens it holds, in which cells, and the sequence of which its first `n_shared` are."""

    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    seq: SeqRef | None = None
    n_shared: int = 0


@dataclass
class Cells:
    """The engine, naively: which cells each sequence and each client's slot holds, and what a slot says that it shares."""

    seqs: dict[SeqRef, list[int]] = field(default_factory=dict)
    slots: dict[str, SlotCells] = field(default_factory=dict)
    n_made: int = 0
    n_seqs: int = 0
    n_asked: int = 0

    def new(self, n: int) -> list[int]:
        self.n_made += n
        return list(range(self.n_made - n, self.n_made))

    def make(self, tokens: list[int], base: SeqRef | None, shared: int) -> SeqRef:
        """A sequence of these tokens, the first of which are in the cells of another."""
        self.n_seqs += 1
        return self.hold(SeqRef(self.n_seqs % 7, self.n_seqs), tokens, base, shared)

    def hold(self, seq: SeqRef, tokens: list[int], base: SeqRef | None, shared: int) -> SeqRef:
        self.seqs[seq] = (self.seqs[base][:shared] if base is not None else []) + self.new(len(tokens) - shared)
        return seq

    def free(self, seq: SeqRef) -> None:
        del self.seqs[seq]

    def attach(self, client: str, tokens: list[int], seq: SeqRef) -> None:
        """The client asks two tokens more than the pool's, in its own slot, which keeps what agrees as far as the pool does."""
        self.n_asked += 1
        prompt = [*tokens, *(100 + 2 * (self.n_asked % 1000) + i for i in (0, 1))]
        slot = self.slots.setdefault(client, SlotCells())
        n_own = common_prefix(as_tokens(slot.tokens), as_tokens(prompt))
        if n_own < len(tokens):
            slot.cells, slot.seq, slot.n_shared, n_own = self.seqs[seq][:], seq, len(tokens), len(tokens)
        slot.n_shared = min(slot.n_shared, n_own)
        slot.tokens, slot.cells = prompt, slot.cells[:n_own] + self.new(len(prompt) - n_own)

    def leave(self, client: str) -> None:
        self.slots.pop(client, None)

    def clear(self) -> None:
        self.seqs.clear()
        self.slots.clear()

    def n_used(self) -> int:
        """Cells that anybody holds."""
        return len(
            {cell for cells in self.seqs.values() for cell in cells} | {cell for slot in self.slots.values() for cell in slot.cells}
        )


def has_pools(machine: TreeLives) -> bool:
    return len(machine.ledger.tree) > 0


def has_grown(machine: TreeLives) -> bool:
    """Else most lives would be spent with one pool or two: what is made would be released at once."""
    return len(machine.ledger.tree) > 4


class TreeLives(RuleBasedStateMachine):
    """Each rule is one client's call; the model is told what the core commanded, and judges it by plain rules."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LedgerLimits(pool_grace_s=5.0))
        self.core = Lifetime(self.ledger)
        self.now, self.boot = 0.0, 0
        self.requests: dict[int, tuple[int, str]] = {}
        self.engine = self.new_engine()
        self.files: set[int] = set()
        self.reboot()

    def new_engine(self) -> Cells:
        return Cells()

    # -- the naive rules

    def users(self, pool_id: int) -> int:
        attached = sum(session.pool_id == pool_id for session in self.ledger.sessions)
        return attached + sum(held == pool_id for held, _ in self.requests.values())

    def below(self, pool_id: int) -> list[Pool]:
        found = [pool for pool in self.ledger.tree if pool.parent == pool_id]
        return found + [lower for pool in found for lower in self.below(pool.pool_id)]

    def stays(self, pool: Pool) -> bool:
        """May nobody take its KV?"""
        if pool.pin is not None or self.users(pool.pool_id):
            return True
        below = self.below(pool.pool_id)
        return any(self.users(lower.pool_id) or (lower.seq and lower.parent == pool.pool_id) for lower in below)

    def resident(self) -> dict[int, bool]:
        return {pool.pool_id: self.stays(pool) for pool in self.ledger.tree if pool.seq is not None}

    def obey(self, commands: object, before: dict[int, bool], *, leaf_first: bool = True) -> None:
        """Do what was commanded; nothing may have left that had to stay, and no parent before its child."""
        left = [pool_id for pool_id in before if (pool := self.ledger.tree.get(pool_id)) is None or pool.seq is None]
        freed = [command.seq for command in commands if isinstance(command, FreeSeq)]  # type: ignore[attr-defined]
        self.files -= {command.pool_id for command in commands if isinstance(command, DropCopy)}  # type: ignore[attr-defined]
        assert len(freed) == len(left)
        for seq in freed:
            self.engine.free(seq)
        if len(left) == 1 and leaf_first:
            assert not before[left[0]]

    def picked(self, pick: int) -> Pool | None:
        pools = list(self.ledger.tree)
        return pools[pick % len(pools)] if pools else None

    # -- the calls

    def make(self, tokens: list[int], parent: Pool | None, branch_pos: int) -> None:
        if len(self.engine.seqs) >= N_IDS:
            before = self.resident()
            chosen, commands = self.core.retire(self.now, n_ids=1)
            assert all(not before[pool_id] for pool_id in chosen)
            self.obey(commands, before)
            if not chosen:
                return
        pool_id = self.ledger.tree.take_id()
        array = as_tokens(tokens)
        self.ledger.begin_pool(
            Pool(
                pool_id,
                array,
                hash_prefix(array),
                Residency.MATERIALIZING,
                "m",
                self.now,
                self.now,
                parent=parent.pool_id if parent else None,
                branch_pos=branch_pos,
            )
        )
        self.place(pool_id)

    def place(self, pool_id: int) -> None:
        pool = self.ledger.tree.get(pool_id)
        assert pool is not None
        parent = self.ledger.tree.get(pool.parent) if pool.parent is not None else None
        base = parent.seq if parent is not None else None
        shared = pool.branch_pos if base is not None else 0
        seq = self.engine.make(pool.tokens.tolist(), base, shared)
        self.ledger.place(pool_id, Placement(f"b{self.boot}", seq, 0, base, shared))

    @rule(head=st.integers(1, 3), n=st.integers(1, 6))
    def create(self, head: int, n: int) -> None:
        self.make([head, *range(10, 10 + n)], None, 0)

    @precondition(has_pools)
    @rule(pick=PICK, at=st.integers(1, 9), n=st.integers(0, 3), tail=st.integers(50, 53))
    def fork(self, pick: int, at: int, n: int, tail: int) -> None:
        parent = self.picked(pick)
        if parent is None or parent.residency is Residency.RELEASING:
            return
        tokens = [*parent.tokens[:at].tolist(), *[tail] * n]
        try:
            branch_pos = branch_position(parent, as_tokens(tokens), None)
        except ApiError:
            assert common_prefix(parent.tokens, as_tokens(tokens)) in {0, len(tokens)}
            return
        self.make(tokens, parent, branch_pos)

    @precondition(has_pools)
    @rule(pick=PICK, client=st.sampled_from(CLIENTS), named=st.booleans())
    def attach(self, pick: int, client: str, named: bool) -> None:
        pool = self.picked(pick)
        if pool is None:
            return
        req = self.ledger.take_req()
        try:
            attachment, _ = self.ledger.admit(req, Wish(pool=pool.pool_id, session_id=client if named else None), self.now)
        except ApiError:
            assert pool.residency is Residency.RELEASING
            return
        self.requests[req] = (pool.pool_id, client)
        if attachment.course is Course.REBUILD and len(self.engine.seqs) < N_IDS:
            self.ledger.begin_rebuild(pool.pool_id)
            self.place(pool.pool_id)
        again = self.ledger.tree.get(pool.pool_id)
        if again is not None and again.seq is not None:
            self.engine.attach(client, again.tokens.tolist(), again.seq)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK, dropped=st.booleans())
    def finish(self, pick: int, dropped: bool) -> None:
        req = sorted(self.requests)[pick % len(self.requests)]
        del self.requests[req]
        before = self.resident()
        kind = SlotEventKind.DROPPED if dropped else SlotEventKind.RELEASED
        self.obey(self.ledger.engine_event(SlotEvent(kind, req, 0, 0, None), self.now), before, leaf_first=False)

    @rule(client=st.sampled_from(CLIENTS))
    def leave(self, client: str) -> None:
        if self.ledger.sessions.get(client) is not None:
            self.ledger.end_session(client, self.now)
            self.engine.leave(client)

    @precondition(has_pools)
    @rule(pick=PICK, lease=st.sampled_from([None, 3.0, 50.0]))
    def pin(self, pick: int, lease: float | None) -> None:
        pool = self.picked(pick)
        if pool is not None and pool.residency is not Residency.RELEASING:
            self.core.pin(pool.pool_id, "owner", lease, self.now)

    @precondition(has_pools)
    @rule(pick=PICK)
    def unpin(self, pick: int) -> None:
        pool = self.picked(pick)
        if pool is not None and pool.residency is not Residency.RELEASING:
            self.core.unpin(pool.pool_id, None)

    @precondition(has_pools)
    @rule(pick=PICK)
    def evict(self, pick: int) -> None:
        pool = self.picked(pick)
        if pool is None:
            return
        before = self.resident()
        try:
            commands = self.core.evict(pool.pool_id)
        except ApiError as error:
            assert error.status == 409  # noqa: PT017
            assert pool.residency is Residency.RELEASING or self.stays(pool)
            return
        assert not before.get(pool.pool_id, False)
        self.obey(commands, before)

    @precondition(has_pools)
    @rule(pick=PICK)
    def flush(self, pick: int) -> None:
        pool = self.picked(pick)
        if pool is None or pool.residency is Residency.RELEASING:
            return
        before = self.resident()
        flushed = self.core.flush(pool.pool_id)
        self.obey(flushed.commands, before)
        for lower in (pool, *self.below(pool.pool_id)):
            now = self.ledger.tree.get(lower.pool_id)
            assert now is not None
            assert now.seq is None or now.residency is Residency.RELEASING or self.stays(now)

    @precondition(has_grown)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        pool = self.picked(pick)
        if pool is None:
            return
        before = self.resident()
        try:
            self.ledger.begin_release(pool.pool_id)
        except ApiError as error:
            assert error.status == 409  # noqa: PT017
            assert pool.pin is not None or self.below(pool.pool_id) or pool.residency is Residency.RELEASING
            return
        self.obey(self.ledger.commit_release(pool.pool_id).commands, before, leaf_first=False)

    @precondition(has_grown)
    @rule(pick=PICK, over_pins=st.booleans())
    def release_tree(self, pick: int, over_pins: bool) -> None:
        pool = self.picked(pick)
        if pool is None:
            return
        whole = [pool, *self.below(pool.pool_id)]
        free = not any(self.users(one.pool_id) or one.residency is Residency.RELEASING for one in whole)
        allowed = free and (over_pins or not any(one.pin for one in whole))
        before = self.resident()
        try:
            marked = self.core.begin_release_tree(pool.pool_id, over_pins=over_pins)
        except ApiError:
            assert not allowed
            return
        assert allowed
        commands = [command for done in self.core.commit_release_tree(marked) for command in done.commands]
        self.obey(commands, before, leaf_first=False)
        assert not {one.pool_id for one in whole} & {one.pool_id for one in self.ledger.tree}

    @rule(pick=PICK, gone=st.booleans())
    def copy(self, pick: int, gone: bool) -> None:
        pool = self.picked(pick)
        if pool is not None and (gone or pool.residency is Residency.RESIDENT):
            self.ledger.set_copy(pool.pool_id, None if gone else SavedCopy(1, pool.branch_pos))
            self.files = self.files - {pool.pool_id} if gone else self.files | {pool.pool_id}

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.core.end_leases(self.now)
        assert all(pool.pin is None or pool.pin.until_ts is None or pool.pin.until_ts > self.now for pool in self.ledger.tree)

    @precondition(lambda self: self.boot == 0 or len(self.engine.seqs) == N_IDS)
    @rule()
    def reboot(self) -> None:
        self.boot += 1
        self.engine.clear()
        self.requests.clear()
        boot = f"b{self.boot}"
        Boots(self.ledger).ready(
            EngineFacts(boot, "m", 100, 1000, N_IDS, "any", ""), EngineSnapshot(boot, (), frozenset(), frozenset()), 0
        )

    # -- what is always true

    @invariant()
    def the_engine_holds_what_the_books_say(self) -> None:
        assert {pool.seq for pool in self.ledger.tree if pool.seq is not None} == set(self.engine.seqs)
        assert {book.req for book in self.ledger.books} == set(self.requests)

    @invariant()
    def each_file_is_a_pool_s_and_what_has_one_is_saved(self) -> None:
        assert {pool.pool_id for pool in self.ledger.tree if pool.copy is not None} == self.files
        for pool in self.ledger.tree:
            if pool.seq is None and pool.residency in REBUILDABLE:
                assert (pool.residency is Residency.SAVED) == (pool.copy is not None)
        assert self.ledger.fallen <= {pool.pool_id for pool in self.ledger.tree if pool.seq is None}

    @invariant()
    def every_child_begins_as_its_parent(self) -> None:
        for pool in self.ledger.tree:
            parent = self.ledger.tree.get(pool.parent) if pool.parent is not None else None
            assert (parent is None) == (pool.parent is None)
            assert parent is None or common_prefix(pool.tokens, parent.tokens) >= pool.branch_pos > 0

    @invariant()
    def evictable_and_protected_are_all(self) -> None:
        candidates = self.core.candidates(self.now)
        assert {candidate.pool_id for candidate in candidates} == set(self.resident())
        n = 0
        while n < len(candidates) and choose(candidates, n_ids=n + 1):
            n += 1
        evictable = {candidate.pool_id for candidate in choose(candidates, n_ids=n)}
        assert all(candidate.keep in {None, Keep.CHILDREN} for candidate in candidates if candidate.pool_id in evictable)
        protected = {candidate.pool_id for candidate in candidates} - evictable
        assert len(evictable) + len(protected) == len(candidates)

    @invariant()
    def every_cell_is_somebody_s(self) -> None:
        pools = [pool for pool in self.ledger.tree if pool.seq is not None]
        holders = [Holder(pool.seq, pool.base, pool.n_shared, pool.prefix_len) for pool in pools]
        holders += [Holder(None, slot.seq, slot.n_shared, len(slot.cells)) for slot in self.engine.slots.values()]
        assert sum(owned_tokens(holders, self.ledger.lineage)) == self.engine.n_used()

    def teardown(self) -> None:
        for req in list(self.requests):
            del self.requests[req]
            before = self.resident()
            self.obey(self.ledger.abandon(req, self.now), before, leaf_first=False)
        for client in CLIENTS:
            self.leave(client)
            self.engine.leave(client)
        for pool in [pool for pool in self.ledger.tree if pool.parent is None]:
            before = self.resident()
            marked = self.core.begin_release_tree(pool.pool_id, over_pins=True)
            commands = [command for done in self.core.commit_release_tree(marked) for command in done.commands]
            self.obey(commands, before, leaf_first=False)
        assert len(self.ledger.tree) == len(self.ledger.books) == len(self.ledger.sessions) == 0
        assert (self.engine.seqs, self.engine.n_used(), self.files) == ({}, 0, set())
