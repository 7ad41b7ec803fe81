"""Mirrors core/admission/capacity.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polykv_proxy.core.admission.capacity import capacity
from polykv_proxy.core.admission.gate import Gate, Limits
from polykv_proxy.core.admission.line import Ask
from polykv_proxy.core.admission.load import Load, Run
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Mode, OnSaturation, Policy

POLICY = Policy(10, Mode.ENFORCED, OnSaturation.QUEUE)
IDLE = Load(slots_total=8, cells_total=10_000, cells_free=6000, cells_idle=2000, n_ctx_slot=8192)
BUSY = replace(IDLE, mean_active_tps=30.0, n_active=1, slots_busy=1, runs={1: Run(500)})


def gate() -> Gate:
    made = Gate(Limits(), {2: 1}.get)
    made.set_policy(1, POLICY)
    return made


def test_a_cold_pool_has_its_guarantee_and_no_projection() -> None:
    """Headroom is what may be tried: one."""
    said = capacity(gate(), IDLE, 0, 1)
    assert (said.can_admit, said.reason, said.guaranteed, said.headroom_sessions) == (True, "guaranteed minimum", True, 1)
    assert (said.projected_mean_tps_if_admitted, said.drop_per_admit_ewma, said.mean_active_tps) == (None, None, None)
    assert (said.kv_headroom_pct, said.expected_tokens, said.policy_pool, said.mode) == (80, 512, 1, "enforced")


def test_while_it_settles_nothing_may_start_and_the_clock_is_told() -> None:
    """The reserved newcomer is in the figures."""
    made = gate()
    made.ask(Ask(1, 1, "a", n_prompt=900, max_tokens=100), IDLE, 0)
    said = capacity(made, IDLE, 1, 1)
    assert (said.can_admit, said.reason, said.settling, said.settle_remaining_ms) == (False, "measurement settling", True, 19_000)
    assert (said.headroom_sessions, said.n_warming, said.n_pool_sessions, said.slots_free) == (0, 1, 1, 7)
    assert (said.kv_cells_reserved, said.kv_headroom_pct) == (1000, 70)


def test_model_and_measure_stand_side_by_side() -> None:
    """The floor is held against the measure where there is one."""
    made = gate()
    made.ask(Ask(1, 1, "a"), IDLE, 0)
    made.wake(BUSY, 1)
    said = capacity(made, BUSY, 2, 1)
    assert (said.can_admit, said.projected_mean_tps_model, said.projected_mean_tps_measured, said.value) == (True, 15, None, 15)
    assert said.headroom_sessions == 1
    made.outlook.forecasts[1].drop_ewma, made.outlook.forecasts[1].cost_s = 4.0, 1 / 26 - 1 / 30
    said = capacity(made, BUSY, 2, 2)
    assert said.projected_mean_tps_model == 15
    assert said.projected_mean_tps_if_admitted == said.projected_mean_tps_measured == pytest.approx(26)
    assert (said.headroom_sessions, said.drop_per_admit_ewma, said.policy_pool) == (7, 4, 1)


def test_expected_tokens_are_held_against_cells_that_are_free_or_can_be_had() -> None:
    """More than there are now: not now. More than there can be: never."""
    made = gate()
    assert capacity(made, IDLE, 0, 1, expected_tokens=8000).can_admit
    said = capacity(made, IDLE, 0, 1, expected_tokens=8001)
    assert (said.can_admit, said.arm, said.reason, said.value, said.threshold) == (
        False,
        "context",
        "context headroom exhausted",
        8001,
        8000,
    )
    assert capacity(made, IDLE, 0, 1, expected_tokens=9000).arm == "never_fits"
    assert capacity(made, IDLE, 0, 1, n_prefix=8000, expected_tokens=192).arm == "never_fits"


def test_a_known_session_is_told_so() -> None:
    """It goes on, whatever the pool has left."""
    made = gate()
    made.session_attached("a", 1)
    said = capacity(made, replace(IDLE, slots_busy=8), 0, 1, session="a")
    assert (said.can_admit, said.known_session, said.arm) == (True, True, "continuation")


def test_without_a_policy_only_what_is_physical_counts() -> None:
    """The same report for requests without a pool, by the default policy or none."""
    made = gate()
    said = capacity(made, IDLE, 0)
    assert (said.can_admit, said.reason, said.mode, said.policy_pool, said.headroom_sessions) == (True, "ok", None, None, 8)
    assert (said.projected_mean_tps_model, said.settling) == (None, False)
    full = replace(IDLE, cells_free=100, cells_idle=0)
    assert capacity(made, full, 0, expected_tokens=10).reason == "kv headroom exhausted"
    made.set_policy(DEFAULT_SCOPE, replace(POLICY, mode=Mode.ADVISORY))
    assert (capacity(made, IDLE, 0).mode, capacity(made, IDLE, 0).policy_pool) == ("advisory", None)


def test_a_split_cache_is_counted_in_streams() -> None:
    """Cells of others are of no use there."""
    split = replace(IDLE, streams_total=8, streams_free=2, cells_per_stream=1250)
    said = capacity(gate(), split, 0, 1, expected_tokens=100)
    assert (said.headroom_sessions, said.kv_headroom_pct, said.kv_streams_free, said.kv_cells_per_stream) == (1, None, 2, 1250)
    none = capacity(gate(), replace(split, streams_free=0), 0, 1, expected_tokens=100)
    assert (none.can_admit, none.reason, none.headroom_sessions) == (False, "no free stream (split cache)", 0)


def test_those_who_wait_are_counted_and_told_how_long() -> None:
    """From departures; null before any."""
    made = gate()
    made.ask(Ask(1, 1, "a"), IDLE, 0)
    made.ask(Ask(2, 1, "b"), IDLE, 0)
    assert (capacity(made, IDLE, 0, 1).n_queued, capacity(made, IDLE, 0, 1).expected_wait_ms) == (1, None)
    made.turnover.left(0)
    made.turnover.left(10)
    assert capacity(made, IDLE, 12, 1).expected_wait_ms == 18_000
