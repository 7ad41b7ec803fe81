"""Mirrors core/admission/forecast.py."""

from __future__ import annotations

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.admission.forecast import Basis, Forecast, Pending
from polykv_proxy.core.admission.load import Load, Run
from polykv_proxy.core.admission.policy import Policy

POLICY = Policy(10, settle_tokens=48, settle_max_ms=5000)


def load(mean: float | None, n: int = 1, runs: dict[int, int] | None = None) -> Load:
    return Load(mean, n, runs={req: Run(n_decoded) for req, n_decoded in (runs or {}).items()})


def test_a_window_ends_by_the_tokens_of_the_session_that_was_admitted() -> None:
    """Nobody else's; what the mean lost by then is the drop."""
    made = Forecast()
    made.admitted(7, load(30), 0)
    made.observe(POLICY, load(30, 1, {7: 0, 3: 900}), 1)
    assert made.settling
    made.observe(POLICY, load(21, 2, {7: 47}), 2)
    assert made.settling
    made.observe(POLICY, load(20, 2, {7: 48}), 2.1)
    assert not made.settling
    assert made.drop_ewma == 10


def test_the_clock_runs_from_the_first_token_and_has_a_hard_end() -> None:
    """A long prompt is not settling time; four times the window is the end of it. Too few tokens are no sample."""
    made = Forecast()
    made.admitted(7, load(30), 0)
    made.observe(POLICY, load(30, 1, {7: 0}), 14)
    assert made.remaining_s(POLICY, 14) == 6
    made.observe(POLICY, load(30, 1, {7: 1}), 14.5)
    assert made.remaining_s(POLICY, 14.5) == 5
    made.observe(POLICY, load(20, 2, {7: 20}), 19.5)
    assert not made.settling
    made.admitted(8, load(30), 100)
    made.observe(POLICY, load(30, 1, {8: 0}), 120)
    assert not made.settling
    assert made.drop_ewma is None


def test_a_window_ends_with_its_request() -> None:
    """With enough tokens it is a sample, else none; to close what has no window changes nothing."""
    made = Forecast()
    made.admitted(7, load(30), 0)
    made.observe(POLICY, load(25, 2, {7: 5}), 1)
    made.closed(7, POLICY, load(25))
    made.closed(7, POLICY, load(25))
    assert not made.settling
    assert made.drop_ewma is None


@pytest.mark.parametrize("spoilt", ["left before", "left meanwhile", "one more", "one less"])
def test_what_others_did_is_not_the_cost_of_an_admission(spoilt: str) -> None:
    """The drop is as documented; the cost waits for a sample that nobody else had a hand in."""
    made = Forecast()
    if spoilt == "left before":
        made.left(0.5)
    made.admitted(7, load(30, 2), 1)
    if spoilt == "left meanwhile":
        made.left(2)
    n_active = {"one more": 4, "one less": 2}.get(spoilt, 3)
    made.observe(POLICY, load(29, n_active, {7: 48}), 3)
    assert (made.drop_ewma, made.cost_s) == (1, None)


def test_drops_are_averaged_and_a_rise_is_a_drop_of_zero() -> None:
    """Each weighs 0.3; a mean that rose is nobody's merit."""
    made = Forecast()
    for n, (before, after) in enumerate([(30, 20), (20, 15), (15, 18)]):
        made.admitted(n, load(before), 20 * n)
        made.observe(POLICY, load(after, 2, {n: 48}), 20 * n + 0.5)
    assert made.drop_ewma == pytest.approx((10 * 0.7 + 5 * 0.3) * 0.7)
    assert made.cost_s == pytest.approx(0.7 / 60)
    assert made.n_samples == 3


def test_without_a_measure_the_knee_is_projected() -> None:
    """mean·n/(n+1): what the engine gives, shared by one more; each session on its way counts like the newcomer."""
    made = Forecast()
    assert made.project(Basis(30, 2, 0), Pending()).used == 20
    assert made.project(Basis(30, 2, 1), Pending(1)).used == 15


def test_what_an_admission_cost_a_token_is_projected_at_any_speed() -> None:
    """Steps of 14.3 ms and 12 ms for each session: the drop from one to two is twelve, that from four to five less than three."""
    made = Forecast()
    tps = [1 / (0.0143 + 0.012 * n) for n in range(7)]
    for n in (1, 2):
        made.admitted(n, load(tps[n], n), n)
        made.observe(POLICY, load(tps[n + 1], n + 1, {n: 48}), n + 0.5)
    assert made.drop_ewma == pytest.approx(0.7 * 11.93 + 0.3 * 6.22, abs=0.01)
    assert made.project(Basis(tps[4], 4, 0), Pending()).measured == pytest.approx(tps[5])
    assert made.project(Basis(tps[4], 4, 1), Pending(1)).measured == pytest.approx(tps[6])
    assert made.room(Basis(tps[3], 3, 0), Pending(), 15.0, 99) == 1
    assert made.room(Basis(tps[4], 4, 0), Pending(), 15.0, 99) == 0


def told(made: Forecast, *means: float, since: float = 0.0) -> float:
    """One settled mean a second; when the last was."""
    for n, mean in enumerate(means):
        made.observe(POLICY, load(mean, 4), since + n)
    return since + len(means) - 1


def test_a_gap_between_turns_is_not_room() -> None:
    """What the mean was below in a tenth of the last minute counts, with all gone or only some; never more than the mean is."""
    made = Forecast()
    now = told(made, 12, *9 * [30])
    assert made.basis(load(30, 1), 4, Pending(), now) == Basis(30, 1, 0)
    now = told(made, 12, since=now + 1)
    assert made.basis(load(30, 1), 4, Pending(), now) == Basis(12, 1, 0)
    assert made.basis(load(11, 1), 4, Pending(), now) == Basis(11, 1, 0)
    assert made.basis(load(None, 0), 4, Pending(), now + 29) == Basis(12, 4, 0, idle=True)
    assert made.basis(load(None, 0), 0, Pending(), now) is None
    assert made.basis(load(30, 1), 4, Pending(), now + 60) == Basis(30, 1, 0)


def test_paused_sessions_count_as_far_as_the_last_minute_is_not_known() -> None:
    """All of them at first, none once it is."""
    made = Forecast()
    assert made.basis(load(30, 1), 4, Pending(1, 0, 3), 0) == Basis(30, 1, 4)
    now = told(made, *31 * [30])
    assert made.basis(load(30, 1), 4, Pending(1, 0, 3), now) == Basis(30, 1, 2.5)
    now = told(made, *31 * [30], since=now + 1)
    assert made.basis(load(30, 1), 4, Pending(1, 0, 3), now) == Basis(30, 1, 1)


def test_what_was_before_an_admission_counts_as_it_would_be_with_it() -> None:
    """By the measured drop, and back when somebody leaves; without a measure by the model, and then it is forgotten."""
    made = Forecast()
    now = told(made, 20, 20)
    made.admitted(7, load(20, 3), now)
    made.closed(7, POLICY, load(20))
    assert made.basis(load(40), 4, Pending(), now) == Basis(20, 1, 0)
    made.admitted(8, load(20, 3), now)
    made.observe(POLICY, load(None, 0, {8: 5}), now)
    made.closed(8, POLICY, load(20))
    assert made.basis(load(40), 4, Pending(), now) == Basis(15, 1, 0)
    made.left(now)
    assert made.basis(load(40), 4, Pending(), now) == Basis(40, 1, 0)
    now = told(made, 20, 20, since=now + 1)
    made.cost_s = 1 / 16 - 1 / 20
    made.admitted(9, load(20, 3), now)
    made.observe(POLICY, load(None, 0, {9: 5}), now)
    made.closed(9, POLICY, load(20))
    after = made.basis(load(40), 4, Pending(), now)
    assert after is not None
    assert after.mean == pytest.approx(16)
    made.left(now)
    back = made.basis(load(40), 4, Pending(), now)
    assert back is not None
    assert back.mean == pytest.approx(20)


def test_an_old_mean_says_nothing() -> None:
    """A scope that was idle for long has its capacity, unless sessions warm up there."""
    made = Forecast()
    made.observe(POLICY, load(12, 4), 0)
    assert made.basis(load(None, 0), 4, Pending(), 30) is None
    assert not made.project(None, Pending()).unknown
    assert made.project(None, Pending(1)).unknown


def test_room_is_at_most_one_until_a_drop_was_measured() -> None:
    """Then as many as keep each token's time below that of the floor."""
    made = Forecast()
    assert made.room(None, Pending(), 10, 99) == 1
    assert made.room(None, Pending(1), 10, 99) == 0
    assert made.room(Basis(30, 2, 0), Pending(), 10, 99) == 1
    assert made.room(Basis(12, 2, 0), Pending(), 10, 99) == 0
    made.cost_s = 0.01
    assert made.room(Basis(30, 2, 0), Pending(), 10, 99) == 6
    assert made.room(Basis(30, 2, 1), Pending(1), 10, 99) == 5
    assert made.room(Basis(30, 2, 0), Pending(), 10, 3) == 3
    made.cost_s = 0
    assert made.room(Basis(30, 2, 0), Pending(), 10, 99) == 99


FIGURE = st.none() | st.floats(0, 1e6)


@given(
    st.lists(st.tuples(st.integers(0, 5), FIGURE, st.integers(0, 200), st.floats(0, 20))), st.integers(0, 50), st.integers(0, 50)
)
def test_every_figure_is_finite_or_none_and_room_agrees_with_the_projection(
    steps: list[tuple[int, float | None, int, float]], warming: int, more: int
) -> None:
    """After any life; and with more on their way there is never more room."""
    made, now, n = Forecast(), 0.0, 0
    for what, mean, tokens, took in steps:
        now, n = now + took, n + (what == 0)
        if what == 0:
            made.admitted(n, load(mean, 3), now)
        elif what == 1:
            made.closed(n, POLICY, load(mean))
        elif what == 2:
            made.left(now)
        else:
            made.observe(POLICY, load(mean, 4, {n: tokens}), now)
    seen = load(steps[-1][1] if steps else None, 3)
    rooms = []
    for pending in (Pending(warming), Pending(warming + more)):
        basis = made.basis(seen, 4, pending, now)
        projection = made.project(basis, pending)
        assert all(
            value is None or isfinite(value) for value in (projection.model, projection.measured, made.drop_ewma, made.cost_s)
        )
        rooms.append(made.room(basis, pending, 10.0, 1000))
        assert (rooms[-1] > 0) is not (projection.unknown or (projection.used is not None and projection.used < 10.0))
    assert rooms[1] <= rooms[0]


def test_the_worked_example_of_the_documentation() -> None:
    """docs/admission.md: steps of 14.3 ms and 12 ms for each session, a floor of 15: four are let in, the fifth is not."""
    paces = [1 / (0.0143 + 0.012 * n) for n in range(1, 6)]
    assert [round(pace, 1) for pace in paces[:4]] == [38.0, 26.1, 19.9, 16.1]
    assert round(Basis(paces[0], 1, 0).model(), 1) == 19.0
    cost_s = 1 / paces[1] - 1 / paces[0]
    assert [round(Basis(paces[n], n + 1, 0).measured(cost_s), 1) for n in (1, 2, 3)] == [19.9, 16.1, 13.5]
    assert int((1 / 15 - 1 / paces[1]) / cost_s) == 2
