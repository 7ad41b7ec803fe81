"""Mirrors core/admission/gate.py, decisions.py and outlook.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polykv_proxy.core.admission.gate import Gate, Limits
from polykv_proxy.core.admission.line import Ask
from polykv_proxy.core.admission.load import Load, Run
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Mode, OnSaturation, Policy
from polykv_proxy.core.admission.verdict import Arm, Outcome, Reason, Verdict

REJECT = Policy(10, Mode.ENFORCED, settle_tokens=48, settle_max_ms=5000)
QUEUE = replace(REJECT, on_saturation=OnSaturation.QUEUE)
IDLE = Load(slots_total=64, cells_total=100_000, cells_free=100_000, n_ctx_slot=8192)


def gate(policy: Policy | None = REJECT, pool_id: int = 1, limits: Limits | None = None) -> Gate:
    made = Gate(limits or Limits(), {2: 1, 3: 1}.get)
    if policy is not None:
        made.set_policy(pool_id, policy)
    return made


def new(req: int, pool_id: int | None = 1, **more: object) -> Ask:
    return Ask(req, pool_id, f"s{req}", n_prompt=100, max_tokens=100, **more)  # type: ignore[arg-type]


def running(mean: float | None, *reqs: int, n_decoded: int = 500) -> Load:
    """All of them decode at that pace."""
    runs = {req: Run(n_decoded) for req in reqs}
    return replace(
        IDLE, mean_active_tps=mean, n_active=len(reqs), slots_busy=len(reqs), cells_free=100_000 - 200 * len(reqs), runs=runs
    )


def settled(made: Gate, mean: float = 30.0, n: int = 1, now: float = 0.0) -> Load:
    """`n` sessions are in, overcommitted, and the pool is settled at that mean."""
    for req in range(1, n + 1):
        assert made.ask(new(req, overcommit=True), IDLE, now).outcome is Outcome.ADMITTED
    load = running(mean, *range(1, n + 1))
    made.wake(load, now)
    return load


def one(verdicts: list[Verdict]) -> Verdict:
    assert len(verdicts) == 1
    return verdicts[0]


def test_without_policies_and_bounds_there_is_nothing_to_decide() -> None:
    """`off` is what callers look at first."""
    assert gate(None).off
    assert not gate().off
    assert not gate(None, limits=Limits(max_running=3)).off


def test_the_first_session_of_a_pool_is_guaranteed_and_those_after_it_wait_until_it_has_settled() -> None:
    """Then the floor decides with what was measured: admitted while the projection holds, refused below."""
    made = gate()
    assert made.ask(new(1), IDLE, 0).finding.arm is Arm.GUARANTEE
    held = made.ask(new(2), IDLE, 0)
    assert (held.outcome, held.finding.reason, held.position, held.deadline) == (Outcome.HELD, Reason.SETTLING, 1, 6)
    assert made.wake(running(30, 1, n_decoded=20), 1) == []
    assert made.next_wake(1) == 6
    let_in = one(made.wake(running(30, 1, n_decoded=48), 2))
    assert (let_in.req, let_in.outcome, let_in.finding.value, let_in.waited_s) == (2, Outcome.ADMITTED, 15, 2)
    assert made.ask(new(3), running(30, 1), 2).outcome is Outcome.HELD
    refused = one(made.wake(running(14, 1, 2), 4))
    assert (refused.outcome, refused.finding.arm) == (Outcome.REJECTED, Arm.FLOOR)
    assert refused.error_extra() == {
        "arm": "floor",
        "reason": "projected mean tps below floor",
        "value": pytest.approx(1 / (2 / 14 - 1 / 30)),
        "threshold": 10,
        "headroom_sessions": 0,
        "mean_active_tps": 14,
        "retry_after": 5,
    }


def test_sixty_four_at_once_never_overshoot() -> None:
    """On a cold pool one is in and all others wait; when settling held them long enough, the floor counts who is on the way."""
    made = gate(replace(REJECT, max_queue=100))
    verdicts = [made.ask(new(req), IDLE, 0) for req in range(1, 65)]
    assert [verdict.outcome for verdict in verdicts] == [Outcome.ADMITTED] + 63 * [Outcome.HELD]
    later = made.wake(replace(IDLE, n_warming=1, slots_busy=1, runs={1: Run()}), 6)
    assert {verdict.outcome for verdict in later} == {Outcome.REJECTED}
    assert {verdict.finding.reason for verdict in later} == {Reason.FLOOR_UNKNOWN}
    made = gate(replace(REJECT, max_queue=0, guarantee_min_sessions=0))
    load = settled(made, 45.0)
    assert sum(made.ask(new(req), load, 1).outcome.admits for req in range(100, 164)) == 3


def test_cells_are_reserved_in_the_step_that_admits() -> None:
    """Sixteen at once on an engine with room for five: five."""
    made = gate(replace(REJECT, guarantee_min_sessions=64, max_queue=0))
    small = replace(IDLE, cells_total=1000, cells_free=1000)
    verdicts = [made.ask(new(req), small, 0) for req in range(1, 17)]
    assert [verdict.finding.arm for verdict in verdicts] == 5 * [Arm.GUARANTEE] + 11 * [Arm.CONTEXT]


def test_a_known_session_is_never_gated() -> None:
    """Whatever the floor and the line say; a new one beside it is refused."""
    made = gate()
    load = settled(made, 5.0)
    made.session_attached("s1", 1)
    made.closed(1, 1)
    verdict = made.ask(replace(new(2), session="s1"), load, 1)
    assert (verdict.outcome, verdict.finding.arm) == (Outcome.ADMITTED, Arm.CONTINUATION)
    assert made.ask(new(3), load, 1).outcome is Outcome.REJECTED


def test_the_second_request_of_a_waiting_session_goes_in_with_the_first() -> None:
    """It is a continuation from then on, wherever it stands."""
    made = gate(QUEUE)
    load = settled(made, 11.0)
    for req, session in [(2, "a"), (3, "b"), (4, "a")]:
        assert made.ask(replace(new(req), session=session), load, 1).outcome is Outcome.HELD
    made.closed(1, 2)
    verdicts = made.wake(running(30.0), 3)
    assert [(verdict.req, verdict.finding.arm) for verdict in verdicts] == [(2, Arm.GUARANTEE), (4, Arm.CONTINUATION)]


def test_overcommit_bypasses_the_policy_and_is_counted() -> None:
    """It is a new session all the same: the pool settles after it."""
    made = gate()
    load = settled(made, 5.0)
    assert made.ask(new(2, overcommit=True), load, 1).finding.arm is Arm.OVERCOMMIT
    assert made.decisions.ends[Arm.OVERCOMMIT, Outcome.ADMITTED] == 2
    assert made.outlook.forecasts[1].settling


def test_a_warning_lets_in_what_the_floor_would_not() -> None:
    """With the number that remains; what is physical is refused even so."""
    made = gate(replace(REJECT, on_saturation=OnSaturation.WARN))
    load = settled(made, 12.0)
    verdict = made.ask(new(2), load, 1)
    assert (verdict.outcome, verdict.finding.arm, verdict.sessions_remaining) == (Outcome.WARNED, Arm.FLOOR, 0)
    full = replace(load, slots_busy=64)
    made.closed(2, 2)
    assert made.ask(new(3), full, 2).outcome is Outcome.REJECTED


def test_advice_refuses_nobody_and_says_what_it_would_have_done() -> None:
    """So that a floor can be tried."""
    made = gate(replace(REJECT, mode=Mode.ADVISORY))
    assert [made.ask(new(req), IDLE, 0).would for req in (1, 2)] == [None, Outcome.HELD]
    made.wake(running(5, 1, 2), 1)
    verdict = made.ask(new(3), running(5, 1, 2), 2)
    assert (verdict.outcome, verdict.would, verdict.finding.arm) == (Outcome.ADMITTED, Outcome.REJECTED, Arm.FLOOR)
    assert made.decisions.would == {(Arm.SETTLING, Outcome.HELD): 1, (Arm.FLOOR, Outcome.REJECTED): 1}


def test_who_queues_has_a_place_a_deadline_and_an_end() -> None:
    """Full is refused; who left is cancelled; who waited too long is told so; headroom lets the next in."""
    made = gate(replace(QUEUE, max_queue=3, queue_timeout_ms=30_000, fail_fast=True))
    load = settled(made, 11.0, n=2)
    assert [made.ask(new(req), load, 1).position for req in (3, 4, 5)] == [1, 2, 3]
    full = made.ask(new(6), load, 1)
    assert (full.outcome, full.finding.arm, full.should_retry, full.retry_after_s) == (Outcome.QUEUE_FULL, Arm.FLOOR, False, 5)
    cancelled = made.closed(4, 2)
    assert cancelled is not None
    assert cancelled.outcome is Outcome.CANCELLED
    assert made.closed(4, 2) is None
    made.closed(1, 3)
    made.closed(2, 3)
    assert one(made.wake(IDLE, 4)).finding.arm is Arm.GUARANTEE
    late = one(made.wake(IDLE, 31))
    assert (late.req, late.outcome, late.finding.reason) == (5, Outcome.TIMED_OUT, Reason.FLOOR_UNKNOWN)
    assert (len(made.lines), made.next_wake(31)) == (0, None)


def test_nobody_overtakes_who_waits() -> None:
    """With room for one, the newcomer stands behind."""
    made = gate(QUEUE)
    load = settled(made, 11.0)
    made.ask(new(2), load, 1)
    made.closed(1, 2)
    behind = made.ask(new(3), IDLE, 2)
    assert (behind.outcome, behind.finding.reason, behind.position) == (Outcome.HELD, Reason.LINE, 2)
    assert one(made.wake(IDLE, 2)).req == 2


def test_pools_take_turns_at_what_comes_free() -> None:
    """One slot at a time: no pool is passed over, however long the line of another."""
    patient = replace(QUEUE, guarantee_min_sessions=64, queue_timeout_ms=1_000_000)
    made = gate(patient)
    made.set_policy(5, patient)
    full = replace(IDLE, slots_busy=64)
    for req, pool_id in [(1, 1), (2, 1), (3, 1), (4, 5)]:
        made.ask(new(req, pool_id), full, 0)
    order = []
    for now in range(4):
        order.append(one(made.wake(replace(IDLE, slots_busy=63), now)).req)
        made.closed(order[-1], now)
    assert order == [1, 4, 2, 3]


def test_the_queue_outlives_its_engine() -> None:
    """Without an engine only deadlines pass; with the next one those who wait go on."""
    made = gate(QUEUE)
    load = settled(made, 11.0)
    made.ask(new(2), load, 1)
    made.closed(1, 2)
    made.engine_changed()
    assert made.wake(None, 3) == []
    assert one(made.wake(IDLE, 4)).outcome is Outcome.ADMITTED
    made.ask(new(3), IDLE, 5)
    assert one(made.wake(None, 36)).outcome is Outcome.TIMED_OUT


def test_one_runs_one_waits_and_four_are_refused() -> None:
    """The bounds of the server count all generating requests together, of whatever session and pool."""
    made = gate(None, limits=Limits(max_running=1, max_queued=1))
    made.session_attached("known", None)
    asks = [Ask(1), new(2, 7), Ask(3, None, "known"), new(4, 9), Ask(5), Ask(6)]
    verdicts = [made.ask(ask, IDLE, 0) for ask in asks]
    assert [verdict.outcome for verdict in verdicts] == [Outcome.ADMITTED, Outcome.HELD] + 4 * [Outcome.QUEUE_FULL]
    assert {verdict.retry_after_s for verdict in verdicts[2:]} == {5}
    made.closed(1, 1)
    assert one(made.wake(IDLE, 1)).req == 2


def test_what_never_fits_is_no_matter_of_time() -> None:
    """Neither held nor told to try again."""
    verdict = gate(QUEUE).ask(Ask(1, 1, "a", n_prefix=8000, n_prompt=500), IDLE, 0)
    assert (verdict.outcome, verdict.finding.arm, verdict.retry_after_s) == (Outcome.NEVER_FITS, Arm.NEVER_FITS, None)


def test_a_fork_shares_the_guarantee_of_the_pool_whose_policy_it_has() -> None:
    """One guaranteed session for all of them; with a policy of its own it has its own."""
    made = gate(replace(REJECT, max_queue=0))
    assert made.ask(new(1, 2), IDLE, 0).finding.arm is Arm.GUARANTEE
    load = running(8, 1)
    made.wake(load, 1)
    assert made.ask(new(2, 3), load, 1).outcome is Outcome.REJECTED
    made.set_policy(3, replace(REJECT, max_queue=0))
    assert made.ask(new(3, 3), load, 1).finding.arm is Arm.GUARANTEE


@pytest.mark.parametrize(("protects", "admitted"), [(False, True), (True, False)])
def test_plain_traffic_respects_the_floors_of_pools_where_asked_to(protects: bool, admitted: bool) -> None:
    """By the default policy's word."""
    made = gate(replace(REJECT, target_tps_per_session=25))
    made.set_policy(DEFAULT_SCOPE, replace(REJECT, target_tps_per_session=1, guarantee_min_sessions=0, protect_floors=protects))
    load = settled(made, 30.0)
    assert made.ask(new(7, None), load, 1).outcome.admits is admitted


def test_a_policy_that_goes_lets_in_who_waits_by_it() -> None:
    """At the next wake."""
    made = gate(QUEUE)
    load = settled(made, 11.0)
    made.ask(new(2), load, 1)
    assert made.drop_policy(1) == QUEUE
    assert one(made.wake(load, 2)).finding.arm is Arm.NO_POLICY


def test_retry_after_is_learned_from_those_who_leave() -> None:
    """Whole seconds, from 1 to 60."""
    made = gate(replace(REJECT, max_queue=0))
    load = settled(made, 11.0, n=3)
    made.closed(1, 10)
    made.closed(2, 22)
    made.wake(running(11.0, 3), 23)
    assert made.ask(new(9), running(11.0, 3), 23.5).retry_after_s == 11
    assert made.ask(new(10), load, 500).retry_after_s == 60


def test_the_ring_tells_the_last_decisions_in_order() -> None:
    """Each once, with its wait; no more than it holds."""
    made = gate(None, limits=Limits(max_running=1, ring=2))
    for req in (1, 2):
        made.ask(Ask(req, None, f"s{req}"), IDLE, 0)
    made.closed(1, 3)
    made.wake(IDLE, 3)
    made.closed(2, 4)
    made.ask(Ask(3), IDLE, 5)
    assert [(d.number, d.session, d.verdict.req, d.verdict.waited_s) for d in made.decisions] == [(2, "s2", 2, 3), (3, None, 3, 0)]
    assert made.decisions.holds == {Arm.RUNNING: 1}


def test_a_retired_pool_leaves_nothing() -> None:
    """Neither policy nor forecast nor estimate."""
    made = gate()
    made.ask(replace(new(1), max_tokens=None), IDLE, 0)
    made.closed(1, 1, n_decoded=40)
    assert made.outlook.need(replace(new(2), max_tokens=None), IDLE).n_answer == 40
    made.pool_gone(1)
    assert (len(made.outlook.policies), len(made.outlook.forecasts), len(made.outlook.answers)) == (0, 0, 0)


def test_more_prompts_than_slots_are_charged_with_all_slots() -> None:
    """The engine computes them as slots come free, so that they can begin on an idle one; each answer counts as one."""
    made, load = gate(), replace(IDLE, slots_total=8)
    verdict = made.ask(Ask(1, 1, n_prompt=100, n_tasks=20), load, 0)
    assert verdict.finding.arm is Arm.GUARANTEE
    assert made.ask(new(2, overcommit=True), load, 0).headroom_sessions == 0
    made.closed(1, 1, 20 * 30)
    assert made.outlook.answers[1].mean == 30
    assert made.ask(Ask(3, 1, n_prompt=100, n_tasks=20), replace(load, slots_busy=1), 1).finding.arm is Arm.SLOTS
