"""What peers get and how long they wait, in virtual time: the engine's own pace on a simulated device."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.gpu_share import schedule
from tests.unit.gpu_share.registries import entry
from tests.unit.gpu_share.sim import Event, Kind, Seen, simulate

TEN_S = 10_000.0


def window_ms(weights: list[float], peer: int) -> float:
    made = schedule.make_schedule([entry(slot, weight) for slot, weight in enumerate(weights)])
    return (made.windows[peer].end_us - made.windows[peer].begin_us) / 1000


def bound_ms(weights: list[float], peer: int) -> float:
    made = schedule.make_schedule([entry(slot, weight) for slot, weight in enumerate(weights)])
    return made.period_us / 1000 - window_ms(weights, peer)


def ratio_error(weights: list[float], seen: list[Seen], steps_ms: list[float]) -> float:
    """The largest relative error of a share of device time against the weights."""
    used = [one.steps * step for one, step in zip(seen, steps_ms, strict=True)]
    wanted = [float(share) for share in schedule.shares(weights)]
    return max(abs(part / sum(used) / share - 1) for part, share in zip(used, wanted, strict=True))


@pytest.mark.parametrize("weights", [[1, 1], [2, 1], [3, 1], [9, 1], [2, 1, 1], [1] * 9])
@pytest.mark.parametrize("step_ms", [0.5, 1.0, 2.0])
def test_short_steps_keep_every_promise(weights: list[float], step_ms: float) -> None:
    """Shares within 5 %, at least 97 % of what one alone does, and no gap beyond (1 - share) of the period and one step."""
    seen = simulate(weights, [step_ms] * len(weights))
    assert ratio_error(weights, seen, [step_ms] * len(weights)) < 0.05
    assert sum(one.steps for one in seen) * step_ms >= 0.97 * TEN_S
    for peer, one in enumerate(seen):
        assert one.max_gap_ms <= bound_ms(weights, peer) + 2 * step_ms  # beside a peer that runs over, a step takes twice as long


@pytest.mark.parametrize("weights", [[1, 1], [2, 1], [3, 1], [2, 1, 1]])
def test_longer_steps_keep_the_proportion_and_the_device_busy(weights: list[float]) -> None:
    """Batches of several requests, 3 to 33 ms: what a peer runs over it loses to its neighbour's running over."""
    errors = []
    for step_ms in range(3, 34):
        seen = simulate(weights, [step_ms] * len(weights), jitter=0.1, end_s=42.0)
        errors.append(ratio_error(weights, seen, [step_ms] * len(weights)))
        assert sum(one.steps for one in seen) * step_ms >= 0.99 * 4 * TEN_S
    assert median(errors) < 0.02
    assert max(errors) < 0.05


@given(
    st.lists(st.floats(0.1, 20), min_size=2, max_size=6),
    st.lists(st.floats(0.3, 30), min_size=6, max_size=6),
)
def test_whatever_the_weights_and_steps_the_device_is_busy_and_nobody_is_left_without(
    weights: list[float], steps: list[float]
) -> None:
    """Each gets at least half of its share, and no gap is longer than its bound and all steps that may run over into it."""
    steps = steps[: len(weights)]
    seen = simulate(weights, steps)
    parts = [float(share) for share in schedule.shares(weights)]
    for peer, (one, step, part) in enumerate(zip(seen, steps, parts, strict=True)):
        assert one.steps * step >= 0.5 * part * TEN_S
        assert one.max_gap_ms <= bound_ms(weights, peer) + 2 * sum(steps)
    assert sum(one.steps * step for one, step in zip(seen, steps, strict=True)) >= 0.95 * TEN_S


@pytest.mark.parametrize("unequal", [(2.0, 12.0), (12.0, 2.0), (5.0, 11.0)])
def test_peers_with_steps_of_different_length_are_served_by_time(unequal: tuple[float, float]) -> None:
    """Weights divide time, not steps: to within the longer step a window."""
    seen = simulate([1, 1], list(unequal), jitter=0.1, end_s=42.0)
    assert ratio_error([1, 1], seen, list(unequal)) < 0.5 * max(unequal) / 40 + 0.05


def test_alone_or_beside_idle_peers_nobody_ever_waits() -> None:
    """Every step follows the one before at once."""
    (one,) = simulate([1], [2.0])
    assert (one.steps, one.max_gap_ms) == (5001, pytest.approx(2.0))
    busy, idle = simulate([0.01, 1000], [2.0, 2.0], [Event(0, 0, Kind.WORK)])
    assert (busy.steps, idle.steps) == (5001, 0)


@pytest.mark.parametrize(("kind", "limit_s"), [(Kind.IDLE, 2.1), (Kind.KILL, 3.1), (Kind.STOP, 3.1)])
def test_what_a_peer_leaves_goes_to_the_others_in_time(kind: Kind, limit_s: float) -> None:
    """Idle: two seconds; dead or stopped: three; and what waits for its window then."""
    start = [Event(0, 0, Kind.WORK), Event(0, 1, Kind.WORK)]
    stays, _ = simulate([1, 1], [2.0, 2.0], [*start, Event(5.013, 1, kind)], end_s=15.0)
    assert 5.0 < stays.last_long_s <= 5.013 + limit_s


def test_a_peer_that_was_stopped_comes_back_to_its_share() -> None:
    start = [Event(0, 0, Kind.WORK), Event(0, 1, Kind.WORK), Event(3, 1, Kind.STOP), Event(13, 1, Kind.CONTINUE)]
    seen = simulate([2, 1], [2.0, 2.0], start, from_s=14.0, end_s=24.0)
    assert ratio_error([2, 1], seen, [2.0, 2.0]) < 0.05


def test_a_late_start_and_a_new_weight_take_effect_within_a_period() -> None:
    """Twenty seconds apart; a second after the change the proportion is the new one."""
    late = [Event(0, 0, Kind.WORK), Event(20, 1, Kind.WORK)]
    seen = simulate([2, 1], [2.0, 2.0], late, from_s=20.2, end_s=30.2)
    assert ratio_error([2, 1], seen, [2.0, 2.0]) < 0.05
    changed = [Event(0, 0, Kind.WORK), Event(0, 1, Kind.WORK), Event(5, 1, Kind.WEIGHT, 6.0)]
    seen = simulate([2, 1], [2.0, 2.0], changed, from_s=5.2, end_s=15.2)
    assert ratio_error([2, 6], seen, [2.0, 2.0]) < 0.05


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 0.2, -7.0, 86400.0 * 365])
def test_a_set_clock_costs_at_most_a_period(step_s: float) -> None:
    """No gap is longer than one more period, and the proportion stays."""
    events = [Event(0, 0, Kind.WORK), Event(0, 1, Kind.WORK), Event(6.0071, 0, Kind.CLOCK, step_s)]
    seen = simulate([2, 1], [2.0, 2.0], events)
    assert ratio_error([2, 1], seen, [2.0, 2.0]) < 0.06
    for peer, one in enumerate(seen):
        assert one.max_gap_ms <= bound_ms([2, 1], peer) + 4.0 + 120.0
