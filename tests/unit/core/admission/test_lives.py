"""Whole lives of a gate, at random: what holds whatever happens in whatever order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from polykv_proxy.core.admission.capacity import capacity
from polykv_proxy.core.admission.decisions import ADVICE, BARS, ENDS
from polykv_proxy.core.admission.gate import Gate, Limits
from polykv_proxy.core.admission.line import Ask
from polykv_proxy.core.admission.load import Load, Run
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Mode, OnSaturation, Policy
from polykv_proxy.core.admission.verdict import Outcome, Verdict

SLOTS, CELLS, CONTEXT = 6, 3000, 900
POOLS = st.sampled_from([None, 1, 2, 5])
TREE = {2: 1}
POLICIES = st.builds(
    Policy,
    st.sampled_from([1.0, 8.0, 20.0]),
    st.sampled_from([Mode.ENFORCED, Mode.ENFORCED, Mode.ADVISORY]),
    st.sampled_from(OnSaturation),
    guarantee_min_sessions=st.integers(0, 3),
    settle_tokens=st.sampled_from([1, 48]),
    settle_max_ms=st.sampled_from([500, 5000]),
    max_queue=st.sampled_from([0, 2, 64]),
    queue_timeout_ms=st.sampled_from([1, 3000, 30_000]),
)


class Lives(RuleBasedStateMachine):
    """A gate before an engine that shares sixty tokens a second among those who decode."""

    @initialize(
        max_running=st.none() | st.integers(1, 4),
        max_queued=st.none() | st.integers(0, 5),
        policy=POLICIES,
        scope=st.integers(0, 2),
    )
    def begin(self, max_running: int | None, max_queued: int | None, policy: Policy, scope: int) -> None:
        self.gate = Gate(Limits(max_running, max_queued, queue_timeout_s=5.0), TREE.get)
        self.gate.set_policy(scope, policy)
        self.now = 0.0
        self.asks: dict[int, Ask] = {}
        self.admitted: dict[int, Ask] = {}
        self.runs: dict[int, Run] = {}
        self.deadlines: dict[int, float] = {}
        self.ended: set[int] = set()
        self.sessions: set[str] = set()

    def load(self) -> Load:
        decoding = sum(run.n_decoded > 0 for run in self.runs.values())
        used = sum(self.admitted[req].n_prompt + run.n_decoded for req, run in self.runs.items())
        return Load(
            60 / decoding if decoding else None,
            decoding,
            len(self.runs) - decoding,
            slots_total=SLOTS,
            slots_busy=len(self.runs),
            cells_total=CELLS,
            cells_free=max(0, CELLS - used),
            n_ctx_slot=CONTEXT,
            runs=dict(self.runs),
        )

    def took(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            assert verdict.retry_after_s is None or 1 <= verdict.retry_after_s <= 60
            assert all(not isinstance(value, float) or isfinite(value) for value in asdict(verdict).values())
            if verdict.outcome is Outcome.HELD:
                assert verdict.deadline is not None
                self.deadlines[verdict.req] = verdict.deadline
                continue
            assert verdict.req not in self.ended
            self.ended.add(verdict.req)
            self.deadlines.pop(verdict.req, None)
            if verdict.outcome.admits:
                self.admitted[verdict.req] = self.asks[verdict.req]

    @rule(
        pool=POOLS,
        session=st.none() | st.sampled_from("abcd"),
        n_prompt=st.sampled_from([0, 100, 600, 1000]),
        max_tokens=st.none() | st.just(50),
        n_slots=st.integers(1, 2),
        overcommit=st.booleans(),
        n=st.integers(1, 12),
    )
    def ask(
        self, pool: int | None, session: str | None, n_prompt: int, max_tokens: int | None, n_slots: int, overcommit: bool, n: int
    ) -> None:
        for _ in range(n):
            req = len(self.asks) + 1
            self.asks[req] = Ask(req, pool, session, 0, n_prompt, max_tokens, n_slots, overcommit)
            self.took([self.gate.ask(self.asks[req], self.load(), self.now)])

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 10.0]), engine=st.booleans())
    def wait(self, seconds: float, engine: bool) -> None:
        self.now += seconds
        self.took(self.gate.wake(self.load() if engine else None, self.now))
        assert all(self.now < deadline for deadline in self.deadlines.values())

    @rule()
    def launch(self) -> None:
        for req, ask in self.admitted.items():
            busy = sum(run.n_slots for run in self.runs.values())
            if req not in self.runs and busy + ask.n_tasks <= SLOTS:
                self.runs[req] = Run(0, ask.n_tasks)

    @rule(n_tokens=st.sampled_from([1, 30, 100]))
    def decode(self, n_tokens: int) -> None:
        self.runs = {req: replace(run, n_decoded=run.n_decoded + n_tokens) for req, run in self.runs.items()}

    @rule(data=st.data(), twice=st.booleans(), n_decoded=st.none() | st.integers(0, 500))
    def close(self, data: st.DataObject, twice: bool, n_decoded: int | None) -> None:
        """At any point of its way: waiting, admitted, running, long over, never seen."""
        req = data.draw(st.integers(1, len(self.asks) + 1))
        for _ in range(1 + twice):
            verdict = self.gate.closed(req, self.now, n_decoded)
            self.took([verdict] if verdict is not None else [])
        self.admitted.pop(req, None)
        self.runs.pop(req, None)

    @rule(session=st.sampled_from("abcd"), pool=POOLS, ends=st.booleans())
    def session(self, session: str, pool: int | None, ends: bool) -> None:
        if ends:
            self.gate.session_ended(session, self.now)
        else:
            self.gate.session_attached(session, pool)

    @rule(scope=st.sampled_from([DEFAULT_SCOPE, 1, 2]), policy=st.none() | POLICIES)
    def rules(self, scope: int, policy: Policy | None) -> None:
        if policy is None:
            self.gate.drop_policy(scope)
        else:
            self.gate.set_policy(scope, policy)

    @rule()
    def reboot(self) -> None:
        """The engine dies: its requests are over, whoever waits goes on."""
        for req in list(self.admitted):
            self.gate.closed(req, self.now)
        self.admitted, self.runs = {}, {}
        self.gate.engine_changed()

    @rule(pool=POOLS, expected=st.none() | st.integers(0, 5000), session=st.none() | st.sampled_from("abcd"))
    def look(self, pool: int | None, expected: int | None, session: str | None) -> None:
        """A report changes nothing, and every figure in it is finite or null."""
        load = self.load()
        said = capacity(self.gate, load, self.now, pool, expected_tokens=expected, session=session)
        assert capacity(self.gate, load, self.now, pool, expected_tokens=expected, session=session) == said
        figures: dict[str, Any] = dict(said.as_object())
        assert all(not isinstance(value, float) or isfinite(value) for value in figures.values())
        assert said.headroom_sessions >= 0
        assert said.can_admit or said.headroom_sessions == 0 or said.arm in {"never_fits", "context", "kv_headroom"}

    @invariant()
    def books(self) -> None:
        """What is reserved is what is admitted and not over; who waits is who has neither end nor place."""
        if not hasattr(self, "gate"):
            return
        assert {one.req for one in self.gate.outlook.reservations} == set(self.admitted)
        assert {waiting.ask.req for waiting in self.gate.lines} == set(self.asks) - self.ended
        bound = self.gate.limits.max_running
        assert bound is None or len(self.admitted) <= bound
        assert len(self.gate.lines) <= (self.gate.limits.max_queued if self.gate.limits.max_queued is not None else 10**6)

    def teardown(self) -> None:
        """Everything ends: the books are at zero, and everybody got one answer."""
        if not hasattr(self, "gate"):
            return
        self.now += 10_000
        self.took(self.gate.wake(self.load(), self.now))
        for req in self.asks:
            self.gate.closed(req, self.now)
        for session in "abcd":
            self.gate.session_ended(session, self.now)
        load, outlook = Load(), self.gate.outlook
        assert set(self.asks) == self.ended
        assert (len(self.gate.lines), len(outlook.reservations), len(outlook.attached), +outlook.attached.per_pool()) == (
            0,
            0,
            0,
            {},
        )
        assert (outlook.reservations.cells(load), outlook.reservations.slots(load)) == (0, 0)
        self.gate.wake(load, self.now)
        assert not any(forecast.settling for forecast in outlook.forecasts.values())
        decided = self.gate.decisions
        assert sum(decided.ends.values()) == len(self.asks)
        assert decided.waits_s.count == sum(decided.holds.values())
        assert (set(decided.ends) - ENDS, set(decided.holds) - set(BARS), set(decided.would) - ADVICE) == (set(), set(), set())


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
