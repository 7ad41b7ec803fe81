"""Mirrors core/ledger.py: laws over random histories, and the moments that decided its shape."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polykv_proxy.core.attach import Course, Wish
from polykv_proxy.core.boots import MODEL_CHANGED, Boots
from polykv_proxy.core.commands import EndSession, FreeSeq, SavePool
from polykv_proxy.core.events import EngineFacts, EngineSnapshot, SlotEvent, SlotEventKind
from polykv_proxy.core.ledger import Ledger, LedgerLimits, Placement
from polykv_proxy.core.pools import Pool, Residency, SeqRef
from polykv_proxy.core.prefix import as_tokens, hash_prefix
from polykv_proxy.errors import ApiError

KIND = SlotEventKind
NONE: frozenset[int] = frozenset()


def facts(boot: str = "b1", model: str = "m") -> EngineFacts:
    return EngineFacts(boot, model, 100, 1000, 4, "any", "")


def snapshot(
    boot: str = "b1", seqs: tuple[SeqRef, ...] = (), reqs: frozenset[int] = NONE, sessions: frozenset[int] = NONE
) -> EngineSnapshot:
    return EngineSnapshot(boot, seqs, reqs, sessions)


def pool(pool_id: int, name: str | None = None, **more: object) -> Pool:
    tokens = as_tokens([pool_id, 2, 3])
    return Pool(pool_id, tokens, hash_prefix(tokens), Residency.MATERIALIZING, "m", 0, 0, name=name, **more)  # type: ignore[arg-type]


def event(kind: SlotEventKind, req: int, index: int = 0, **more: object) -> SlotEvent:
    return SlotEvent(kind, req, index, 0, None, **more)  # type: ignore[arg-type]


def ready() -> Ledger:
    ledger = Ledger(LedgerLimits())
    Boots(ledger).ready(facts(), snapshot(), 0)
    return ledger


def with_pool(ledger: Ledger, pool_id: int = 1, seq: SeqRef = SeqRef(4, 1), boot: str = "b1") -> None:  # noqa: B008
    ledger.tree.take_id()
    ledger.begin_pool(pool(pool_id))
    assert ledger.place(pool_id, Placement(boot, seq, 3)) == [SavePool(pool_id)]


def test_books_close_on_the_engine_s_word_not_on_http() -> None:
    """The end of HTTP leaves the book open; `released` closes it."""
    ledger = ready()
    req = ledger.take_req()
    _, session = ledger.admit(req, Wish(session_id="s"), 0)
    assert session is not None
    ledger.engine_event(event(KIND.LAUNCHED, req), 1)
    ledger.http_done(req, 2, refused=False)
    assert ledger.sessions.get("s").n_streams == 1  # type: ignore[union-attr]
    ledger.engine_event(event(KIND.RELEASED, req), 3)
    assert (len(ledger.books), ledger.sessions.get("s").n_streams) == (0, 0)  # type: ignore[union-attr]


def test_a_refused_request_closes_with_its_answer() -> None:
    """An error answer of the engine made no task; the book closes at the end of HTTP."""
    ledger = ready()
    req = ledger.take_req()
    ledger.admit(req, Wish(session_id="s"), 0)
    ledger.http_done(req, 1, refused=True)
    assert len(ledger.books) == 0


def test_a_request_that_left_no_trace_is_settled_from_the_state() -> None:
    """A book whose HTTP ended without an answer closes once the engine's state does not know the request."""
    ledger = ready()
    req = ledger.take_req()
    ledger.admit(req, Wish(session_id="s"), 0)
    ledger.http_done(req, 1, refused=False)
    ledger.settle_overdue(snapshot(reqs=frozenset({req})), 100)
    assert len(ledger.books) == 1
    ledger.settle_overdue(snapshot(), 2)
    assert len(ledger.books) == 1
    ledger.settle_overdue(snapshot(), 100)
    assert len(ledger.books) == 0


def test_several_tasks_close_one_book() -> None:
    """A request with three tasks is over when the third is, be it released or dropped."""
    ledger = ready()
    req = ledger.take_req()
    ledger.admit(req, Wish(session_id="s", n_tasks=3), 0)
    for index in (0, 1):
        ledger.engine_event(event(KIND.LAUNCHED, req, index), 1)
        ledger.engine_event(event(KIND.RELEASED, req, index), 2)
    assert len(ledger.books) == 1
    ledger.engine_event(event(KIND.DROPPED, req, 2), 3)
    assert len(ledger.books) == 0


def test_a_new_boot_closes_books_and_loses_pools() -> None:
    """After a restart of the engine nothing is resident, no book is open, and old session numbers are gone."""
    ledger = ready()
    with_pool(ledger)
    ledger.admit(ledger.take_req(), Wish(pool=1, session_id="s"), 0)
    assert Boots(ledger).ready(facts("b2"), snapshot("b2"), 1) == []
    found = ledger.tree.get(1)
    assert found is not None
    assert (found.residency, found.seq, len(ledger.books), len(ledger.sessions)) == (Residency.LOST, None, 0, 0)


def test_the_same_boot_gives_a_lost_pool_back() -> None:
    """A pool that was only out of reach is resident again, one whose sequence is gone stays lost."""
    ledger = ready()
    with_pool(ledger, 1, SeqRef(4, 1))
    with_pool(ledger, 2, SeqRef(5, 1))
    Boots(ledger).lost("away")
    assert {p.residency for p in ledger.tree} == {Residency.LOST}
    Boots(ledger).ready(facts(), snapshot(seqs=(SeqRef(4, 1), SeqRef(5, 2))), 1)
    assert [p.residency for p in ledger.tree] == [Residency.RESIDENT, Residency.LOST]


def test_a_starting_proxy_adopts_its_own_and_frees_strays() -> None:
    """Sequences of this boot that the journal knows are adopted; others, and unknown sessions, are given back."""
    ledger = Ledger(LedgerLimits())
    ledger.restore(pool(3), Placement("b1", SeqRef(4, 1), 3))
    ledger.restore(pool(5), Placement("b0", SeqRef(5, 1), 3))
    commands = Boots(ledger).ready(facts(), snapshot(seqs=(SeqRef(4, 1), SeqRef(5, 1)), sessions=frozenset({9})), 0)
    assert [p.residency for p in ledger.tree] == [Residency.RESIDENT, Residency.LOST]
    assert commands == [FreeSeq(SeqRef(5, 1), "b1"), EndSession(9)]
    assert ledger.tree.take_id() == 6


def test_another_model_fails_its_pools_until_it_is_back() -> None:
    """Pools of another model are `failed: model_changed`, never attached or rebuilt; with their model back they are only lost."""
    ledger = ready()
    with_pool(ledger)
    Boots(ledger).ready(facts("b2", "other"), snapshot("b2"), 1)
    failed = ledger.tree.get(1)
    assert failed is not None
    assert (failed.residency, failed.reason) == (Residency.FAILED, MODEL_CHANGED)
    assert ledger.admit(ledger.take_req(), Wish(pool=1), 2)[0].course is Course.UNSHARED
    Boots(ledger).ready(facts("b3"), snapshot("b3"), 3)
    assert ledger.tree.get(1).residency is Residency.LOST  # type: ignore[union-attr]


def test_a_sequence_of_another_boot_is_never_freed_here() -> None:
    """A pool that arrives after a restart is lost, and the like-named sequence of the new boot is left alone."""
    ledger = ready()
    ledger.begin_pool(pool(1))
    Boots(ledger).ready(facts("b2"), snapshot("b2"), 1)
    assert ledger.place(1, Placement("b1", SeqRef(4, 1), 3)) == []
    assert ledger.tree.get(1).residency is Residency.LOST  # type: ignore[union-attr]


def test_a_release_waits_for_running_requests() -> None:
    """With requests running a pool is releasing and takes no new ones; it goes with the last book. A second release is a 409."""
    ledger = ready()
    with_pool(ledger)
    req = ledger.take_req()
    ledger.admit(req, Wish(pool=1, session_id="s"), 0)
    ledger.sessions.open("idle", 0)
    ledger.sessions.put(replace(ledger.sessions.get("idle"), pool_id=1))  # type: ignore[type-var]
    ledger.begin_release(1)
    outcome = ledger.commit_release(1)
    assert (outcome.running, outcome.detached, outcome.commands) == (1, ("idle",), ())
    with pytest.raises(ApiError, match="being released"):
        ledger.begin_release(1)
    ledger.engine_event(event(KIND.LAUNCHED, req), 1)
    assert ledger.engine_event(event(KIND.RELEASED, req), 2) == [FreeSeq(SeqRef(4, 1), "b1")]
    assert ledger.tree.get(1) is None


def test_a_release_that_cannot_be_written_is_undone() -> None:
    """Reverting puts the pool back as it was, even when its last request ended meanwhile."""
    ledger = ready()
    with_pool(ledger)
    req = ledger.take_req()
    ledger.admit(req, Wish(pool=1), 0)
    before = ledger.begin_release(1)
    assert ledger.engine_event(event(KIND.DROPPED, req), 1) == []
    ledger.revert_release(before)
    assert ledger.tree.get(1).residency is Residency.RESIDENT  # type: ignore[union-attr]


def test_parents_outlive_their_children() -> None:
    """A pool with children is not released; the answer names them."""
    ledger = ready()
    with_pool(ledger)
    ledger.begin_pool(pool(2, parent=1, branch_pos=1))
    with pytest.raises(ApiError) as refused:
        ledger.begin_release(1)
    assert refused.value.extra == {"children": [2]}


def test_an_engine_that_lost_a_sequence_loses_the_pool() -> None:
    """`stale_seq` for the sequence a pool is believed to have makes the pool lost."""
    ledger = ready()
    with_pool(ledger)
    req = ledger.take_req()
    ledger.admit(req, Wish(pool=1), 0)
    ledger.engine_event(event(KIND.LAUNCHED, req), 1)
    ledger.engine_event(replace(event(KIND.RELEASED, req), seq=SeqRef(4, 1), miss="stale_seq"), 2)
    assert ledger.tree.get(1).residency is Residency.LOST  # type: ignore[union-attr]


class Histories(RuleBasedStateMachine):
    """Random lives of pools and requests against a plain model of what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ready()
        self.boot = 1
        self.live: dict[int, tuple[int | None, bool, bool]] = {}
        self.freed: list[SeqRef] = []
        self.made: dict[int, SeqRef] = {}
        self.n_seq = 0
        self.ids: set[int] = set()

    def take(self, commands: object) -> None:
        self.freed += [c.seq for c in commands if isinstance(c, FreeSeq)]  # type: ignore[attr-defined]

    @rule()
    def create(self) -> None:
        pool_id = self.ledger.tree.take_id()
        assert pool_id not in self.ids
        self.ids.add(pool_id)
        self.n_seq += 1
        self.ledger.begin_pool(pool(pool_id))
        self.made[pool_id] = SeqRef(self.n_seq, 1)
        self.take(self.ledger.place(pool_id, Placement(f"b{self.boot}", self.made[pool_id], 3)))

    @rule(pick=st.integers(0, 5), session=st.sampled_from([None, "a", "b"]))
    def attach(self, pick: int, session: str | None) -> None:
        pools = list(self.ledger.tree)
        wanted = pools[pick % len(pools)].pool_id if pools else None
        req = self.ledger.take_req()
        try:
            attachment, _ = self.ledger.admit(req, Wish(pool=wanted, session_id=session), 0)
        except ApiError:
            assert self.ledger.tree.get(wanted).residency is Residency.RELEASING  # type: ignore[union-attr, arg-type]
            return
        self.live[req] = (attachment.pool.pool_id if attachment.pool else None, False, False)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 20), kind=st.sampled_from(list(KIND)))
    def happen(self, pick: int, kind: SlotEventKind) -> None:
        req = sorted(self.live)[pick % len(self.live)]
        held, launched, done = self.live[req]
        if (kind is KIND.DROPPED) == launched or (kind is KIND.LAUNCHED and launched):
            return
        if kind is not KIND.DROPPED and kind is not KIND.LAUNCHED and not launched:
            return
        self.take(self.ledger.engine_event(event(kind, req), 0))
        self.live[req] = (held, True, done)
        if kind in {KIND.DROPPED, KIND.RELEASED}:
            del self.live[req]

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 20), refused=st.booleans())
    def hang_up(self, pick: int, refused: bool) -> None:
        req = sorted(self.live)[pick % len(self.live)]
        held, launched, _ = self.live[req]
        self.take(self.ledger.http_done(req, 0, refused=refused))
        if refused and not launched:
            del self.live[req]
        else:
            self.live[req] = (held, launched, True)

    @rule(pick=st.integers(0, 5))
    def release(self, pick: int) -> None:
        pools = list(self.ledger.tree)
        if not pools:
            return
        chosen = pools[pick % len(pools)].pool_id
        try:
            self.ledger.begin_release(chosen)
        except ApiError as error:
            assert error.status in {404, 409}  # noqa: PT017
            return
        self.take(self.ledger.commit_release(chosen).commands)

    @rule()
    def reboot(self) -> None:
        self.boot += 1
        Boots(self.ledger).ready(facts(f"b{self.boot}"), snapshot(f"b{self.boot}"), 0)
        self.live.clear()

    @invariant()
    def books_are_the_live_requests(self) -> None:
        assert {book.req for book in self.ledger.books} == set(self.live)

    @invariant()
    def sessions_count_their_books(self) -> None:
        for session in self.ledger.sessions:
            assert session.n_streams == sum(book.session == session.number for book in self.ledger.books)
            assert 0 <= session.n_active <= session.n_streams

    @invariant()
    def nothing_in_use_was_freed(self) -> None:
        assert len(self.freed) == len(set(self.freed))
        for found in self.ledger.tree:
            assert found.seq is None or found.seq not in self.freed
            assert found.seq is None or found.residency in {Residency.RESIDENT, Residency.RELEASING}
            assert found.seq is not None or found.residency is not Residency.RESIDENT

    @invariant()
    def releasing_pools_are_held(self) -> None:
        for found in self.ledger.tree:
            if found.residency is Residency.RELEASING:
                assert self.ledger.books.of_pool(found.pool_id)

    def teardown(self) -> None:
        for req in list(self.live):
            self.take(self.ledger.abandon(req, 0))
        for found in list(self.ledger.tree):
            self.ledger.begin_release(found.pool_id)
            self.take(self.ledger.commit_release(found.pool_id).commands)
        assert len(self.ledger.books) == len(self.ledger.tree) == 0
        assert all(session.n_streams == 0 and session.pool_id is None for session in self.ledger.sessions)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.parametrize("before", [Residency.EVICTED, Residency.LOST])
def test_what_could_not_be_made_again_is_as_before(before: Residency) -> None:
    """`lost` is the engine's doing: a pool that was evicted stays evicted."""
    ledger = ready()
    with_pool(ledger)
    ledger.displace(1, before, "before")
    ledger.begin_rebuild(1)
    ledger.rebuild_failed(1, "no ids")
    again = ledger.tree.get(1)
    assert again is not None
    assert (again.residency, again.reason) == (before, "no ids")
