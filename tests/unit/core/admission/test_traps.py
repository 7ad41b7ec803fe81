"""The traps of admission: cold and idle pools stay open, and nobody waits for ever, whatever hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.admission.forecast import FRESH_S
from polykv_proxy.core.admission.gate import Gate, Limits
from polykv_proxy.core.admission.line import Ask
from polykv_proxy.core.admission.load import Load, Run
from polykv_proxy.core.admission.policy import Mode, OnSaturation, Policy
from polykv_proxy.core.admission.verdict import Arm, Outcome, Reason, Verdict

IDLE = Load(slots_total=16, cells_total=100_000, cells_free=100_000, n_ctx_slot=8192)
STRICT = Policy(10, Mode.ENFORCED, guarantee_min_sessions=0)


def gate(policy: Policy = STRICT, limits: Limits | None = None) -> Gate:
    made = Gate(limits or Limits(), {}.get)
    made.set_policy(1, policy)
    return made


def new(req: int, **more: object) -> Ask:
    return Ask(req, 1, f"s{req}", n_prompt=100, max_tokens=100, **more)  # type: ignore[arg-type]


def between_turns(mean: float) -> Gate:
    """A session had a turn at that pace, settled, until time 0; it is still attached."""
    made = gate()
    made.ask(new(1), IDLE, -10)
    made.session_attached("s1", 1)
    runs = {1: Run(500)}
    made.wake(replace(IDLE, mean_active_tps=mean, n_active=1, slots_busy=1, runs=runs), 0)
    made.closed(1, 0)
    return made


def test_a_cold_pool_is_open_without_a_guarantee() -> None:
    """Nothing is measured, nobody is there: nothing can be lost. The second then waits until the first is known."""
    made = gate()
    first, second = made.ask(new(1), IDLE, 0), made.ask(new(2), IDLE, 0)
    assert (first.outcome, first.finding.arm, first.finding.value) == (Outcome.ADMITTED, Arm.NONE, None)
    assert (second.outcome, second.finding.arm) == (Outcome.HELD, Arm.SETTLING)


@pytest.mark.parametrize(("after_s", "reason"), [(FRESH_S - 1, Reason.FLOOR_IDLE), (FRESH_S + 1, Reason.OK)])
def test_a_pool_that_was_slow_is_closed_in_a_gap_and_open_when_it_has_rested(after_s: float, reason: Reason) -> None:
    """Its only session is between turns; after half a minute it has its capacity again."""
    assert between_turns(5.0).ask(new(2), IDLE, after_s).finding.reason is reason


def test_a_slow_mean_of_another_engine_closes_nothing() -> None:
    """The next boot begins cold."""
    made = between_turns(5.0)
    made.engine_changed()
    assert made.ask(new(2), IDLE, 1).outcome is Outcome.ADMITTED


POLICIES = st.builds(
    Policy,
    st.sampled_from([1.0, 10.0, 1e6]),
    st.just(Mode.ENFORCED),
    st.sampled_from(OnSaturation),
    guarantee_min_sessions=st.integers(0, 2),
    settle_tokens=st.sampled_from([1, 48]),
    settle_max_ms=st.sampled_from([1, 500, 5000]),
    max_queue=st.sampled_from([0, 3, 64]),
    queue_timeout_ms=st.sampled_from([1, 3000, 60_000]),
)
HUNG = [
    None,
    IDLE,
    replace(IDLE, n_warming=1, slots_busy=1, runs={1: Run(0)}),
    replace(IDLE, mean_active_tps=2.0, n_active=1, slots_busy=1, runs={1: Run(5)}),
    replace(IDLE, slots_busy=16),
]
"""No engine; one that shows nothing; a prompt that never ends; an answer that stands still; slots that are never free."""


@given(POLICIES, st.sampled_from(HUNG), st.none() | st.integers(1, 2), st.none() | st.integers(0, 4), st.integers(2, 20))
def test_whoever_waits_has_an_end_by_the_gate_s_own_clock(
    policy: Policy, load: Load | None, max_running: int | None, max_queued: int | None, n: int
) -> None:
    """Nothing ever changes but the time, and nobody calls but when `next_wake` says: all get their answer by their deadlines."""
    made = gate(policy, Limits(max_running, max_queued, queue_timeout_s=4.0))
    asked = [made.ask(new(req), load or IDLE, 0.0) for req in range(1, n + 1)]
    ended: list[Verdict] = [verdict for verdict in asked if verdict.outcome is not Outcome.HELD]
    latest = max([verdict.deadline for verdict in asked if verdict.deadline is not None], default=0.0)
    now = 0.0
    for _ in range(4 * n):  # each look brings somebody on: nobody asks the same again and again until time has passed
        at = made.next_wake(now)
        if at is None:
            break
        now = max(at, now)
        ended += made.wake(load, now)
    assert sorted(verdict.req for verdict in ended) == list(range(1, n + 1))
    assert now <= latest
    assert len(made.lines) == 0
