"""Who runs when."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.gpu_share import layout, schedule
from polykv_proxy.gpu_share.schedule import Turn
from tests.unit.gpu_share.registries import NOW, entries, entry, torn

sound = st.lists(st.floats(1 / 512, 1000, width=32), min_size=2, max_size=16)


def peers(*weights: float) -> tuple[layout.Entry, ...]:
    return tuple(entry(slot, weight) for slot, weight in enumerate(weights))


@given(sound)
def test_windows_tile_the_period_exactly_in_the_order_of_the_slots(weights: list[float]) -> None:
    made = schedule.make_schedule(peers(*weights))
    assert [window.slot for window in made.windows] == list(range(len(weights)))
    assert [window.begin_us for window in made.windows] == [0, *(window.end_us for window in made.windows[:-1])]
    assert made.windows[-1].end_us == made.period_us
    assert schedule.MIN_PERIOD_US <= made.period_us <= schedule.MAX_PERIOD_US


@given(sound)
def test_shares_are_proportional_above_the_floor_and_nobody_is_below_it(weights: list[float]) -> None:
    units = [max(1, round(weight * 1000)) for weight in weights]
    shares = schedule.shares(weights)
    floor = Fraction(1, max(10, len(weights)))
    assert sum(shares) == 1
    assert min(shares) >= floor
    above = [(share, unit) for share, unit in zip(shares, units, strict=True) if share > floor]
    assert len({share / unit for share, unit in above}) <= 1
    for share, unit in zip(shares, units, strict=True):  # who is at the floor would have less by weight alone
        if share == floor and above:
            assert unit * above[0][0] <= floor * above[0][1]


@given(sound)
def test_a_window_is_the_share_of_the_period_to_a_microsecond(weights: list[float]) -> None:
    made = schedule.make_schedule(peers(*weights))
    for window, share in zip(made.windows, schedule.shares(weights), strict=True):
        assert abs(window.end_us - window.begin_us - share * made.period_us) < 1


@pytest.mark.parametrize(
    ("weights", "shares", "period_ms"),
    [
        ([1, 1], [50, 50], 80),
        ([2, 1], [66.667, 33.333], 120),
        ([3, 1], [75, 25], 160),
        ([9, 1], [90, 10], 400),
        ([2, 1, 1], [50, 25, 25], 160),
        ([99, 1], [90, 10], 400),
        ([1] * 16, [6.25] * 16, 400),
    ],
)
def test_the_cases_of_the_documents(weights: list[float], shares: list[float], period_ms: int) -> None:
    assert [round(float(share) * 100, 3) for share in schedule.shares(weights)] == shares
    assert schedule.make_schedule(peers(*weights)).period_us == period_ms * 1000


@given(torn(), st.integers(0, 10**6))
def test_at_every_moment_one_peer_runs_and_all_agree_on_which(buffer: bytes, offset: int) -> None:
    now = NOW + offset
    made = schedule.make_schedule(schedule.participants(layout.parse(buffer), now))
    turns = {window.slot: schedule.verdict(made, window.slot, now) for window in made.windows}
    running = [slot for slot, verdict in turns.items() if verdict.turn is Turn.RUN]
    if not turns:
        return
    wide = [window for window in made.windows if window.end_us > window.begin_us]
    assert len(running) == 1
    assert len(wide) == len(made.windows)
    for slot, verdict in turns.items():
        assert now < verdict.until_us <= now + made.period_us
        if verdict.turn is Turn.WAIT:
            assert schedule.verdict(made, slot, verdict.until_us).turn is Turn.RUN
            assert schedule.verdict(made, slot, verdict.until_us - 1).turn is Turn.WAIT


@given(entries(), st.randoms(use_true_random=False))
def test_the_order_of_joining_and_leaving_is_forgotten(written: list[layout.Entry], random: object) -> None:
    """The bytes say everything: who came in another order, or came and left, changes nothing."""
    stay = [one for one in written if one.pid != 0]
    shuffled = list(written)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    buffer = layout.build(())
    present: list[layout.Entry] = []
    for one in shuffled:
        present.append(one)
        buffer = layout.build(present)
    assert schedule.make_schedule(schedule.participants(layout.parse(buffer), NOW)) == schedule.make_schedule(
        schedule.participants(layout.parse(layout.build(stay)), NOW)
    )


def test_who_is_alone_or_not_on_the_list_runs_freely() -> None:
    alone = schedule.make_schedule(schedule.participants((entry(3), entry(4, active=False), entry(5, age_us=4_000_000)), NOW))
    assert alone == schedule.Schedule(0, ())
    assert schedule.verdict(alone, 3, NOW).turn is Turn.FREE
    assert schedule.verdict(schedule.make_schedule(peers(1, 1)), 9, NOW).turn is Turn.FREE
