"""The gate: who asks, who waits, who is in, and how it ended.

Law: the check reserves in the same step. Each request ends once: let in or refused by `ask` or `wake`, or gone by `closed`, which
also gives back what was reserved, exactly once, whoever calls it how often. `wake` is told of every change of the load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from polykv_proxy.core.admission.decisions import RING, Decisions
from polykv_proxy.core.admission.line import Ask, Lines, Waiting
from polykv_proxy.core.admission.load import Load
from polykv_proxy.core.admission.outlook import Outlook
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, OnSaturation, Policy, Ruling
from polykv_proxy.core.admission.reservations import Reservation
from polykv_proxy.core.admission.sessions import Departed, Turnover
from polykv_proxy.core.admission.verdict import Arm, Finding, Outcome, Reason, Verdict

SERVER_LINE = -1
"""The line of those whom only the bound of the whole server holds."""
SOFT = frozenset({Arm.KV, Arm.FLOOR})
"""What a warning is enough for."""
PASSING = frozenset({Arm.SETTLING, Arm.RUNNING, Arm.LINE})
"""What is waited for whatever the policy says of saturation: it passes."""
REFUSED = frozenset({Outcome.REJECTED, Outcome.QUEUE_FULL, Outcome.TIMED_OUT})
LONGEST_RETRY_S = 60
RETRY_S = 5.0
"""When nothing tells how long."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the whole server, None without: requests that run, requests that wait, and how long one waits for the former."""

    max_running: int | None = None
    max_queued: int | None = None
    queue_timeout_s: float = 30.0
    ring: int = RING


@dataclass(frozen=True, slots=True)
class Case:
    """One request at one moment. `ruling`: what holds for a new session there, None for one that goes on or without a policy."""

    ask: Ask
    ruling: Ruling | None
    now: float
    since: float

    @property
    def gated(self) -> Policy | None:
        """The policy that may hold or refuse it."""
        policy = self.ruling.policy if self.ruling is not None else None
        return policy if policy is not None and policy.enforced and not self.ask.overcommit else None

    @property
    def queues(self) -> bool:
        """Is saturation waited for?"""
        return self.gated is not None and self.gated.on_saturation is OnSaturation.QUEUE

    @property
    def line(self) -> int:
        """Where it would wait."""
        return SERVER_LINE if self.gated is None else self.ask.pool_id or DEFAULT_SCOPE

    def waits(self, found: Finding) -> bool:
        """Does this finding make it wait?"""
        return not found.ok and found.arm is not Arm.NEVER_FITS and (found.arm in PASSING or self.queues)


class Gate:
    """Admission of one proxy. `parent_of`: the pool above a pool."""

    def __init__(self, limits: Limits, parent_of: Callable[[int], int | None]) -> None:
        self.limits = limits
        self.outlook = Outlook(parent_of, limits.max_running)
        self.decisions = Decisions(limits.ring)
        self.lines = Lines()
        self.turnover = Turnover()
        self._load: Load | None = None
        self._blind = False

    @property
    def off(self) -> bool:
        """Is there nothing to decide, for anybody? Callers then leave the gate alone."""
        return not self.outlook.policies and self.limits.max_running is None

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(self, ask: Ask, load: Load, now: float) -> Verdict:
        """Let in, refused, or HELD: then `wake` or `closed` brings the end."""
        self._observe(load, now)
        case = self._case(ask, now, now)
        found = self._examine(case, load, settled=case.gated is not None and case.gated.max_queue == 0)
        if self.lines.length(case.line) and (found.ok or found.arm is Arm.SETTLING):
            found = Finding(False, Arm.LINE, Reason.LINE, self.lines.length(case.line), 0)
        return self._join(case, found) if case.waits(found) else self._decide(case, found, load)

    def wake(self, load: Load | None, now: float) -> list[Verdict]:
        """The load has changed, or time has passed: those whose waiting ends. `load` None: there is no engine now."""
        ended: list[Verdict] = []
        self._blind = load is None
        if load is not None:
            self._observe(load, now)
            while (verdict := self._next(load, now)) is not None:
                ended.append(verdict)
        return ended + [self._time_out(waiting, load, now) for waiting in list(self.lines) if now >= waiting.deadline]

    def next_wake(self, now: float) -> float | None:
        """When `wake` has something to do at the latest, the load unchanged; None while nobody waits.

        Without a load only deadlines pass: whoever settles is looked at again when there is an engine.
        """
        ends = [end for waiting in self.lines for end in ([waiting.deadline] if self._blind else self._ends(waiting, now))]
        return min(ends, default=None)

    def closed(self, req: int, now: float, n_decoded: int | None = None) -> Verdict | None:
        """A request is over, however; CANCELLED if it still waited. `n_decoded` of a whole answer teaches how long answers are."""
        waiting = self.lines.leave(req)
        if waiting is not None:
            return self._end(self._case(waiting.ask, now, waiting.since), Outcome.CANCELLED, waiting.finding)
        booked = self.outlook.reservations.give_back(req)
        if booked is None:
            return None
        policy = self.outlook.policies.own(booked.scope) if booked.scope is not None else None
        if policy is not None and booked.scope is not None:
            self.outlook.forecasts[booked.scope].closed(req, policy, self._load)
        if booked.open_ended and n_decoded is not None:
            self.outlook.answers[booked.pool_id or DEFAULT_SCOPE].note(n_decoded // booked.n_answers)
        self._left(self.outlook.attached.closed(booked.session, req, now), now)
        return None

    # -- sessions, policies, the engine -------------------------------------------------------------------------------

    def session_attached(self, session: str, pool_id: int | None) -> None:
        """A named session is there, or has moved to that pool."""
        self.outlook.attached.confirm(session, pool_id)

    def session_ended(self, session: str, now: float) -> None:
        """A named session is no more."""
        self._left(self.outlook.attached.end(session), now)

    def set_policy(self, scope: int, policy: Policy) -> None:
        """A pool's own policy, or that of DEFAULT_SCOPE. What was learned of its speed stays."""
        self.outlook.policies.set(scope, policy)

    def drop_policy(self, scope: int) -> Policy | None:
        """Those who wait by it are let in by the next `wake`."""
        self.outlook.forecasts.pop(scope, None)
        return self.outlook.policies.remove(scope)

    def pool_gone(self, pool_id: int) -> None:
        """A pool that is no more leaves nothing behind."""
        self.drop_policy(pool_id)
        self.outlook.answers.pop(pool_id, None)

    def engine_changed(self) -> None:
        """Another boot: those who wait go on waiting, measured means are of the old one."""
        self._load = None
        for forecast in self.outlook.forecasts.values():
            forecast.forget_means()

    # -- within -------------------------------------------------------------------------------------------------------

    def _observe(self, load: Load, now: float) -> None:
        self._load, self._blind = load, False
        for ruling in self.outlook.policies:
            self.outlook.forecasts[ruling.scope].observe(ruling.policy, load, now)

    def _case(self, ask: Ask, now: float, since: float) -> Case:
        known = ask.unruled or ask.continues or self.outlook.attached.known(ask.session)
        return Case(ask, None if known else self.outlook.policies.ruling(ask.pool_id), now, since)

    def _examine(self, case: Case, load: Load, *, settled: bool) -> Finding:
        if case.gated is not None:
            look = self.outlook.look(case.ask, case.ruling, load, case.now)
            return self.outlook.examine(case.ask, look, load, settled=settled)
        found = self.outlook.hard(case.ask, self.outlook.need(case.ask, load), load)
        return self.outlook.ungated(case.ask, case.ruling) if found.ok else found

    def _join(self, case: Case, found: Finding) -> Verdict:
        full = self.limits.max_queued is not None and len(self.lines) >= self.limits.max_queued
        if full or (case.gated is not None and self.lines.length(case.line) >= case.gated.max_queue):
            return self._end(case, Outcome.QUEUE_FULL, found)
        wait_s = self.limits.queue_timeout_s
        if case.gated is not None and found.arm is not Arm.RUNNING:
            wait_s = case.gated.hold_s
        if case.gated is not None and case.queues:
            wait_s = case.gated.queue_timeout_s
        settling_since = case.now if found.arm is Arm.SETTLING else None
        self.lines.join(Waiting(case.ask, case.line, case.now, case.now + wait_s, found, settling_since))
        verdict = replace(
            self._verdict(case, Outcome.HELD, found),
            position=self.lines.position(case.ask.req),
            expected_wait_s=self.turnover.wait_s(case.now, self.lines.length(case.line) - 1),
            deadline=case.now + wait_s,
        )
        self.decisions.held(verdict)
        return verdict

    def _ends(self, waiting: Waiting, now: float) -> list[float]:
        """Its deadline; and of one that waits for settling, the end of that, and of its patience with it."""
        case = self._case(waiting.ask, now, waiting.since)
        if case.ruling is None or waiting.settling_since is None:
            return [waiting.deadline]
        settled_in = self.outlook.forecasts[case.ruling.scope].remaining_s(case.ruling.policy, now)
        return [waiting.deadline, now + settled_in, max(now, waiting.settling_since + case.ruling.policy.hold_s)]

    def _next(self, load: Load, now: float) -> Verdict | None:
        """The first whose waiting is over, let in or refused: heads by turns, then those whose session has begun meanwhile."""
        known = self.outlook.attached.known
        for waiting in (*self.lines.heads(), *(waiting for waiting in self.lines if known(waiting.ask.session))):
            case = self._case(waiting.ask, now, waiting.since)
            waiting.finding = found = self._examine(case, load, settled=_settled(waiting, case.gated, now))
            if found.arm is not Arm.SETTLING:
                waiting.settling_since = None
            elif waiting.settling_since is None:
                waiting.settling_since = now
            if not case.waits(found):
                self.lines.leave(waiting.ask.req)
                self.lines.served(waiting.line)
                return self._decide(case, found, load)
        return None

    def _time_out(self, waiting: Waiting, load: Load | None, now: float) -> Verdict:
        """Who only waited for settling has the floor decide now; for all others it was too long."""
        self.lines.leave(waiting.ask.req)
        case = self._case(waiting.ask, now, waiting.since)
        if load is not None and case.gated is not None and not case.queues:
            found = self._examine(case, load, settled=True)
            if found.arm is not Arm.RUNNING:
                return self._decide(case, found, load)
        return self._end(case, Outcome.TIMED_OUT, waiting.finding)

    def _decide(self, case: Case, found: Finding, load: Load) -> Verdict:
        """The end of the asking by a finding that nobody waits for."""
        if found.ok:
            return self._admit(case, Outcome.ADMITTED, found, load)
        if found.arm is Arm.NEVER_FITS:
            return self._end(case, Outcome.NEVER_FITS, found)
        if case.gated is not None and case.gated.on_saturation is OnSaturation.WARN and found.arm in SOFT:
            return self._admit(case, Outcome.WARNED, found, load)
        return self._end(case, Outcome.REJECTED, found)

    def _admit(self, case: Case, outcome: Outcome, found: Finding, load: Load) -> Verdict:
        """Let in: the verdict by what was before, then the reservation. What is only advised about is examined all the same."""
        ask, ruling, would = case.ask, case.ruling, None
        if case.gated is None and ruling is not None and not ask.overcommit:
            look = self.outlook.look(ask, ruling, load, case.now)
            found = self.outlook.examine(ask, look, load, settled=False)
            would = None if found.ok else _would(found, ruling.policy)
        verdict = self._end(case, outcome, found, would)
        scope = ruling.scope if ruling is not None else None
        need = self.outlook.need(ask, load)
        self.outlook.reservations.make(
            Reservation(ask.req, ask.session, ask.pool_id, scope, need, ask.max_tokens is None, max(1, ask.n_tasks))
        )
        self.outlook.attached.begin(ask.session, ask.req, ask.pool_id)
        if scope is not None:
            self.outlook.forecasts[scope].admitted(ask.req, load, case.now)
        return verdict

    def _end(self, case: Case, outcome: Outcome, found: Finding, would: Outcome | None = None) -> Verdict:
        verdict = replace(self._verdict(case, outcome, found), would=would)
        self.decisions.end(verdict, case.ask.session, case.now)
        return verdict

    def _verdict(self, case: Case, outcome: Outcome, found: Finding) -> Verdict:
        load, ruling, refused, headroom = self._load, case.ruling, outcome in REFUSED, None
        if load is not None and ruling is not None:
            headroom = self.outlook.headroom(self.outlook.look(case.ask, ruling, load, case.now), ruling, load)
        return Verdict(
            case.ask.req,
            outcome,
            found,
            case.ask.pool_id,
            ruling.scope if ruling is not None else None,
            headroom_sessions=headroom,
            mean_active_tps=load.mean_active_tps if load is not None else None,
            waited_s=max(0.0, case.now - case.since),
            retry_after_s=self._retry_after(case, found) if refused else None,
            should_retry=not (refused and case.gated is not None and case.gated.fail_fast),
        )

    def _retry_after(self, case: Case, found: Finding) -> int:
        """Settling ends by its own clock, all else when somebody leaves and those before had their turn."""
        wait: float | None = self.turnover.wait_s(case.now, self.lines.length(case.line))
        if found.arm is Arm.SETTLING and case.ruling is not None:
            wait = self.outlook.forecasts[case.ruling.scope].remaining_s(case.ruling.policy, case.now)
        return min(LONGEST_RETRY_S, max(1, ceil(RETRY_S if wait is None else wait)))

    def _left(self, departed: Departed | None, now: float) -> None:
        if departed is None:
            return
        self.turnover.left(now)
        ruling = self.outlook.policies.ruling(departed.pool_id)
        if ruling is not None:
            self.outlook.forecasts[ruling.scope].left(now)


def _settled(waiting: Waiting, gated: Policy | None, now: float) -> bool:
    """Was it held for settling long enough?"""
    return gated is not None and waiting.settling_since is not None and now - waiting.settling_since >= gated.hold_s


def _would(found: Finding, policy: Policy) -> Outcome:
    if found.arm is Arm.SETTLING or policy.on_saturation is OnSaturation.QUEUE:
        return Outcome.HELD
    warned = policy.on_saturation is OnSaturation.WARN and found.arm in SOFT
    return Outcome.WARNED if warned else Outcome.REJECTED
