"""Mirrors bench/live: what the rules see, what the probe counts, and that all rules get the same work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.kit.wire import Exchange
from bench.live.compare import planned
from bench.live.probe import Prober
from bench.live.rules import Naive, as_measured, words
from bench.sim.engine import StepLaw
from bench.sim.fleet import Turn, Work
from examples.courier.journal import Event, Journal
from examples.courier.journal import Turn as Answer
from examples.courier.proxy import Capacity

CALM = Capacity(0.0, False, "measurement settling", 0, True, 0, 2, 2, 0, 20.0, None)
LAW = StepLaw(0.001, 0.015, 0.0, 0.008)


def test_the_naive_rule_sees_the_raw_mean_and_its_own_clock_alone() -> None:
    """Settling and advice are nothing to it; who warms up counts as zero; one that is done is replaced between two looks."""
    time = [0.0]
    journal = Journal(15.0, clock=lambda: time[0])
    journal.report(CALM)
    naive = Naive(journal, 5.0)
    assert [naive.may(CALM, all_begun=False) for _ in range(2)] == [True, False]
    time[0] = 6.0
    assert not naive.may(replace(CALM, n_warming=1), all_begun=True)
    time[0] = 12.0
    assert naive.may(replace(CALM, mean_active_tps=None, n_active=0), all_begun=True)
    journal.events.append(Event(12.0, "delivered", "a"))
    assert [naive.may(CALM, all_begun=True) for _ in range(2)] == [True, False]


def test_only_what_came_while_all_decoded_is_a_sample() -> None:
    """Two streams, a token each every half second: a step takes half a second, whoever began first."""
    early = Exchange(arrivals=[0.5 * i for i in range(1, 9)], began=0.0)
    late = Exchange(arrivals=[0.5 * i for i in range(1, 9)], began=1.0)
    assert Prober("http://p", [], 1, 1.0)._decoded([early, late]) == (pytest.approx(0.5), 8)
    with pytest.raises(RuntimeError, match="side by side"):
        Prober("http://p", [], 1, 1.0)._decoded([early, replace_began(late, 10.0)])


def replace_began(done: Exchange, began: float) -> Exchange:
    return Exchange(arrivals=done.arrivals, began=began)


def test_the_simulator_gets_the_tokens_that_were_measured_and_the_gaps_that_were_planned() -> None:
    """By package and turn; a turn that never came stays as planned."""
    work = Work([[Turn(10, 50, 1.0), Turn(20, 50, 2.0)], [Turn(10, 50, 3.0)]], 400)
    journal = Journal(15.0)
    journal.turns = [Answer("naive-3-1", 5.0, 0.1, 1.0, 33, 50), Answer("naive-3-2", 1.0, 0.1, 1.0, 44, 49)]
    found = as_measured(journal, work)
    assert found == Work([[Turn(33, 50, 1.0), Turn(20, 50, 2.0)], [Turn(44, 49, 3.0)]], 400)


def test_a_plan_has_the_floor_between_three_and_four_sessions() -> None:
    """For an engine that shares what it has, whatever its speed."""
    plan = planned("http://p", 62.5, LAW, n_packages=8, run_s=50.0)
    assert plan.floor == pytest.approx(18.75)
    assert 1 / LAW.step_s(4, 0, 0) < plan.floor < 1 / LAW.step_s(3, 0, 0)
    assert plan.work == planned("http://p", 62.5, LAW, n_packages=8, run_s=50.0).work
    assert [len(package.steps) for package in plan.packages()] == [len(turns) for turns in plan.work.packages]


def test_prompts_are_as_long_as_asked_and_differ_at_once() -> None:
    """So that no two of them share more than the pool."""
    texts = [words(40, seed) for seed in range(100, 900, 100)]
    assert {len(text.split()) for text in texts} == {40}
    assert len({tuple(text.split()[:4]) for text in texts}) == len(texts)
