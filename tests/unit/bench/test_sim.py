"""Mirrors bench/sim: an engine as a law of step times, a fleet before it, and what the real gate makes of both."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sim.courier import POOL, RULES, Courier, at_the_floor, deliver, policy_for
from bench.sim.engine import Sample, SimEngine, StepLaw, Task, fit
from bench.sim.fleet import Shape, Turn, Work, work_of
from polykv_proxy.core.admission.load import Load
from polykv_proxy.core.admission.policy import OnSaturation, Policy
from polykv_proxy.core.pace import Pace

LAW = StepLaw(0.0143, 0.012, 0.0, 1 / 3000)
FLOOR = 15.0
SMALL = Shape(n_packages=8, n_turns=(2, 5))


def steady(n_packages: int, n_turns: int = 4, n_answer: int = 400) -> Work:
    """Equal packages without gaps and almost without prompts."""
    return Work([[Turn(8, n_answer, 0.0)] * n_turns] * n_packages)


def test_the_law_is_found_again_in_noisy_samples() -> None:
    """Within a few per cent, each of its terms."""
    source, samples = Random(5), []
    for n in range(1, 9):
        for context in (200, 2000, 8000):
            for prompt in (0, 256):
                step_s = LAW.step_s(n, n * context, prompt) * source.uniform(0.98, 1.02)
                samples.append(Sample(step_s, n, n * context, prompt))
    found = fit(samples)
    assert found.a == pytest.approx(LAW.a, rel=0.1)
    assert found.b == pytest.approx(LAW.b, rel=0.05)
    assert found.c == pytest.approx(LAW.c, rel=0.2)
    assert found.p == pytest.approx(LAW.p, rel=0.05)


def test_a_term_that_would_be_negative_is_none() -> None:
    """Steps that get shorter with context, or never saw a prompt, say nothing of either."""
    found = fit([Sample(0.1 * n - 1e-9 * 100 * n, n, 100 * n * n) for n in (1, 2, 4, 8)])
    assert (found.c, found.p) == (pytest.approx(0, abs=1e-12), 0)
    assert found.b == pytest.approx(0.1, rel=0.01)


def test_a_task_takes_what_the_law_says() -> None:
    """Its prompt in batches, then a token a step; those beside it wait for the longer steps."""
    engine = SimEngine(StepLaw(0.01, 0.01, 0.0, 0.001), n_batch=100)
    engine.submit(Task(1, 0, 200, 11, Pace()))
    (alone,) = engine.advance(10)
    assert alone.first_at == pytest.approx(2 * (0.01 + 0.1))
    assert alone.ended_at == pytest.approx(0.22 + 10 * 0.02)
    assert engine.busy_s == pytest.approx(alone.ended_at)
    assert alone.pace.value == pytest.approx(50)
    engine.submit(Task(2, 0, 100, 1000, Pace()))
    engine.advance(1)
    before = engine.running[2].decoded
    engine.submit(Task(3, 0, 100, 5, Pace()))
    engine.advance(0.12)
    assert engine.running[2].decoded - before == pytest.approx(1)


def test_the_load_is_what_counters_would_tell() -> None:
    """Who is in the prompt warms up; who waits for a slot is not there; tokens are those decoded."""
    engine = SimEngine(LAW, n_slots=2)
    for req in (1, 2, 3):
        engine.submit(Task(req, 2000, 100 if req == 1 else 100_000, 1000, Pace()))
    engine.advance(1.0)
    load = engine.load()
    assert (load.slots_busy, load.n_active, load.n_warming, set(load.runs)) == (2, 1, 1, {1, 2})
    assert load.runs[1].n_decoded > 0
    assert load.runs[2].n_decoded == 0


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_delivers_everything_and_leaves_the_books_at_zero(rule: str) -> None:
    """No deadlock, no starvation: each package comes to its end, and nothing stays behind."""
    for seed in range(3):
        courier = Courier(work_of(SMALL, seed), LAW, rule, FLOOR)
        figures = courier.run(most_s=3600).figures(FLOOR)
        assert all(isfinite(value) for value in figures.values())
        outlook = courier.gate.outlook
        assert (len(outlook.reservations), len(outlook.attached), len(courier.gate.lines)) == (0, 0, 0)
        assert len(courier.result.deliveries) == SMALL.n_packages


def test_the_gate_stops_where_the_law_says_that_the_floor_is() -> None:
    """Four at once make 16 tokens a second, five 13.8: with a floor of 15 there are four, and hardly a moment below."""
    result = deliver(steady(12), LAW, "enforced", FLOOR)
    assert result.under_s < 0.05 * result.wall_s
    assert max(result.n_running) == 4
    assert deliver(steady(12), LAW, "naive", FLOOR).under_s > 0.3 * result.wall_s


def test_a_lagging_signal_makes_no_oscillation() -> None:
    """With work that never ends, sessions rise one by one to where they stay."""
    courier = Courier(steady(12, n_turns=1, n_answer=10_000), LAW, "enforced", FLOOR)
    counts = []
    while courier.engine.now < 200:
        courier.step()
        counts.append(len(courier.engine.running))
    assert all(before <= after <= before + 1 for before, after in pairwise(counts))
    assert counts[-1] == 4
    assert counts[600:] == [4] * len(counts[600:])


class Late(SimEngine):
    """Its counters are told some seconds late."""

    def __init__(self, law: StepLaw, lag_s: float) -> None:
        super().__init__(law)
        self.lag_s = lag_s
        self.told: deque[tuple[float, Load]] = deque()

    def load(self) -> Load:
        self.told.append((self.now, super().load()))
        while len(self.told) > 1 and self.told[1][0] <= self.now - self.lag_s:
            self.told.popleft()
        return self.told[0][1]


@pytest.mark.parametrize("lag_s", [0.0, 2.0, 5.0])
@pytest.mark.parametrize("rule", ["advisory", "enforced"])
def test_sessions_that_come_and_go_stay_at_the_floor_however_late_the_signal(rule: str, lag_s: float) -> None:
    """Never one more than the floor bears, and hardly ever two fewer: who leaves is replaced once, and nobody in advance."""
    work = Work([[Turn(8, 400 + 37 * (n % 5), 0.0)] * 4 for n in range(24)])
    courier = Courier(work, LAW, rule, FLOOR)
    courier.engine = Late(LAW, lag_s)
    counts = []
    while courier.to_spawn or len(courier.gate.lines) or not counts:
        courier.step()
        counts.append(sum(agent.began_at is not None for agent in courier.agents.values()))
    full = counts[counts.index(4) :]
    assert max(counts) == at_the_floor(LAW, FLOOR, 0) == 4
    assert sum(count >= 3 for count in full) > 0.9 * len(full)
    assert courier.result.under_s < 0.01 * courier.engine.now


def test_after_an_overshoot_the_pool_comes_back_to_the_floor() -> None:
    """Eight are in before there is a policy; as they end nobody takes their place until the floor holds again, and it stays."""
    work = Work([[Turn(8, 400 + 60 * n, 0.0)] * 4 for n in range(8)] + [[Turn(8, 400, 0.0)] * 4] * 8)
    courier = Courier(work, LAW, "enforced", FLOOR)
    policy = courier.gate.drop_policy(POOL)
    assert policy is not None
    held = courier.to_spawn[8:]
    courier.to_spawn = courier.to_spawn[:8]
    courier.step()
    courier.gate.set_policy(POOL, policy)
    courier.to_spawn = held
    under = []
    while courier.n_done < 16:
        courier.step()
        under.append(courier.result.under_s)
    assert under[-1] - under[len(under) // 2] < 1


@settings(max_examples=15, deadline=None)
@given(
    st.builds(StepLaw, st.floats(0, 0.05), st.floats(0.002, 0.05), st.floats(0, 1e-6), st.floats(0, 0.005)),
    st.floats(0.2, 200),
    st.integers(0, 99),
    st.sampled_from(["advisory", "enforced"]),
    st.sampled_from(OnSaturation),
)
def test_nobody_waits_for_ever_on_any_engine_with_any_floor(
    law: StepLaw, floor: float, seed: int, rule: str, on_saturation: OnSaturation
) -> None:
    """Not with a floor that even one session cannot reach: the guarantee lets one in after the other."""
    work = work_of(Shape(n_packages=4, n_turns=(1, 3), answer_mean=60.0, gap_mean_s=1.0), seed)
    policy = replace(policy_for(rule, floor), on_saturation=on_saturation)
    assert len(deliver(work, law, rule, floor, policy).deliveries) == 4


def test_a_cold_pool_is_open_without_a_guarantee_too() -> None:
    """With nothing measured and nobody on the way there is nothing to lose."""
    policy = Policy(
        FLOOR, policy_for("enforced", FLOOR).mode, policy_for("enforced", FLOOR).on_saturation, 0, queue_timeout_ms=3_600_000
    )
    assert len(deliver(steady(3), LAW, "enforced", FLOOR, policy).deliveries) == 3


def test_the_same_seed_is_the_same_work() -> None:
    """And another another."""
    assert work_of(SMALL, 7) == work_of(SMALL, 7)
    assert work_of(SMALL, 7) != work_of(SMALL, 8)
