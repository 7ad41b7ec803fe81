"""Mirrors core/throughput.py."""

from __future__ import annotations

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.core.events import Counters, SlotEvent, SlotEventKind, SlotReading, SlotTotals
from polykv_proxy.core.pace import Pace
from polykv_proxy.core.throughput import PATIENCE_S, SAMPLE_US, Throughput, mean
from polykv_proxy.core.turns import Turn, turn_of

Kind = SlotEventKind
BOOT = "boot"
SECOND = 1_000_000


def event(kind: Kind, task: int = 1, session: int = 5, slot: int = 0, **more: object) -> SlotEvent:
    return SlotEvent(kind, req=task, index=0, session=session, seq=None, task=task, slot=slot, **more)  # type: ignore[arg-type]


def reading(slot: int = 0, n: int = 0, us: int = 0, task: int = 1, session: int = 5, total: int | None = None) -> SlotReading:
    return SlotReading(slot, task, task, session, n_decoded=n, us_decode=us, totals=SlotTotals(n if total is None else total))


def meter(boot_id: str = BOOT) -> Throughput:
    made = Throughput()
    made.boot(boot_id)
    return made


def saw(made: Throughput, one: SlotEvent, now: float = 0.0) -> Turn:
    turn = turn_of(one)
    made.saw(one, turn, now)
    return turn


def read(made: Throughput, t_us: int, *readings: SlotReading, now: float = 0.0, boot_id: str = BOOT) -> None:
    made.counted(Counters(boot_id, t_us, readings), now)


def test_a_session_s_pace_is_tokens_after_the_first_by_the_time_since_it() -> None:
    """The first token is free: eleven tokens within a second from the first are ten a second."""
    made = meter()
    saw(made, event(Kind.LAUNCHED), 0)
    read(made, 1, reading(n=11, us=SECOND))
    assert made.tps(5, 0) == pytest.approx(10)
    assert made.generating(5)


def test_between_turns_the_last_figures_stay() -> None:
    """After the release nothing moves, however long nothing happens."""
    made = meter()
    saw(made, event(Kind.LAUNCHED), 0)
    saw(made, event(Kind.FIRST_TOKEN, n_decoded=1, us_prompt=SECOND // 2, n_prompt=20, n_cached=10), 0)
    turn = saw(made, event(Kind.RELEASED, n_decoded=21, us_decode=SECOND, us_prompt=SECOND // 2, n_prompt=20, n_cached=10), 1)
    assert (turn.tps, turn.tpot_s, turn.ttft_s, turn.prompt_tps) == (20, 0.05, 0.5, 20)
    assert made.tps(5, 1e9) == pytest.approx(20)
    assert not made.generating(5)
    assert made.speed(5) is not None
    assert made.speed(5).last_tps == 20  # type: ignore[union-attr]


def test_a_turn_that_starts_keeps_the_figure_of_the_one_before() -> None:
    """In prefill, and at its first token, a session shows what it last had."""
    made = meter()
    for task in (1, 2):
        saw(made, event(Kind.LAUNCHED, task), 0)
        saw(made, event(Kind.FIRST_TOKEN, task, n_decoded=1, us_prompt=9), 0)
        if task == 1:
            saw(made, event(Kind.RELEASED, task, n_decoded=5, us_decode=SECOND), 0)
    assert made.tps(5, 0) == pytest.approx(4)
    assert made.speed(5).last_tps == 4  # type: ignore[union-attr]


def test_cancelled_before_the_first_token_there_is_no_figure() -> None:
    """None, not zero and not NaN."""
    made = meter()
    saw(made, event(Kind.LAUNCHED), 0)
    turn = saw(made, event(Kind.RELEASED, reason="cancelled", us_queued=7), 0)
    assert (turn.ttft_s, turn.tps, turn.tpot_s, turn.prompt_tps, turn.queue_s) == (None, None, None, None, 7e-6)
    assert made.tps(5, 0) is None


def test_time_kept_before_the_engine_counts_as_waiting() -> None:
    """Queue wait and time to first token include what the proxy waited for."""
    turn = turn_of(event(Kind.RELEASED, us_queued=SECOND, us_prompt=SECOND), waited_s=2.0)
    assert (turn.queue_s, turn.ttft_s) == (3.0, 4.0)


def test_a_materialisation_is_nobody_s_stream() -> None:
    """It has a prompt rate and neither a pace nor a first token."""
    made = meter()
    saw(made, event(Kind.LAUNCHED, session=0, fill=True), 0)
    read(made, 1, SlotReading(0, 1, fill=True))
    assert made._streams == {}
    turn = saw(made, event(Kind.RELEASED, session=0, fill=True, us_prompt=SECOND, n_prompt=30), 0)
    assert (turn.prompt_tps, turn.ttft_s) == (30, None)


def test_a_row_from_before_an_event_is_old_news() -> None:
    """Rows published before the slot's last event neither end a task that was launched since nor revive one that is over."""
    made = meter()
    saw(made, event(Kind.LAUNCHED, 1, t_us=100), 0)
    read(made, 50, SlotReading(0))
    assert made.speed(5) is not None
    saw(made, event(Kind.FIRST_TOKEN, 1, t_us=200, n_decoded=1), 0)
    saw(made, event(Kind.RELEASED, 1, t_us=300, n_decoded=3, us_decode=SECOND), 0)
    read(made, 250, reading(n=2, us=SECOND // 2))
    assert not made.generating(5)
    assert made.tps(5, 0) == pytest.approx(2)


def test_a_missed_end_is_seen_in_the_counters() -> None:
    """A slot that works for another task, or for none, has ended the one before."""
    made = meter()
    saw(made, event(Kind.LAUNCHED, 1), 0)
    saw(made, event(Kind.FIRST_TOKEN, 1, n_decoded=1), 0)
    read(made, 10, reading(task=2, session=6, n=3, us=SECOND))
    assert not made.generating(5)
    assert made.generating(6)
    read(made, 20, SlotReading(0))
    assert not made.generating(6)
    assert made.tps(6, 0) == pytest.approx(2)


def test_a_request_without_a_session_is_remembered_by_its_slot() -> None:
    """Its figures stay until the slot has another owner, and then nothing is left of it."""
    made = meter()
    for task in range(1, 50):
        saw(made, event(Kind.LAUNCHED, task, session=0), 0)
        assert list(made._streams) == [task]
        saw(made, event(Kind.RELEASED, task, session=0, n_decoded=3, us_decode=SECOND), 0)
        assert made.slot_owner(0) == -1 - task
        assert made.tps(-1 - task, 0) == pytest.approx(2)
        assert made.speed(-task) is None
    assert len(made._speeds) == 1


def test_an_ended_session_leaves_nothing() -> None:
    """Forgotten at once when idle, with its last task otherwise."""
    made = meter()
    saw(made, event(Kind.LAUNCHED, 1), 0)
    made.forget(5)
    assert made.speed(5) is not None
    saw(made, event(Kind.RELEASED, 1), 0)
    assert made.speed(5) is None
    saw(made, event(Kind.LAUNCHED, 2, session=6), 0)
    saw(made, event(Kind.RELEASED, 2, session=6), 0)
    made.forget(6)
    assert (made.speed(6), made._forgotten) == (None, set())


def test_the_aggregate_counts_tokens_of_all_slots_by_the_engine_s_clock() -> None:
    """A long steady run of two slots of 10 and 30 a second is 40 a second; it fades when nothing comes."""
    made = meter()
    for step in range(200):
        rows = [reading(slot, n=step * per_step, task=slot) for slot, per_step in ((0, 1), (1, 3))]
        read(made, step * SECOND // 10, *rows, now=step / 10)
    assert made.aggregate_tps(19.9) == pytest.approx(40, rel=0.01)
    assert made.totals.n_decoded == 199 * 4
    assert made.aggregate_tps(19.9 + PATIENCE_S) == pytest.approx(made.aggregate_tps(19.9))
    assert made.aggregate_tps(60) < 0.01


def test_a_stalled_stream_gets_slower_and_comes_back() -> None:
    """While the next token does not come the figure falls; the token's own time then counts once."""
    made = meter()
    saw(made, event(Kind.LAUNCHED), 0)
    read(made, 1, reading(n=21, us=2 * SECOND), now=2)
    assert made.tps(5, 2.2) == pytest.approx(10)
    stalled = made.tps(5, 8)
    assert stalled is not None
    assert stalled < 2
    read(made, 2, reading(n=22, us=8 * SECOND), now=8)
    assert made.tps(5, 8) == pytest.approx(Pace().after(20, 2).after(1, 6).value)


def test_counts_of_a_new_boot_are_added_and_its_tasks_are_new() -> None:
    """Totals go on from where they were; what ran in the old boot is over; readings of the old one count no more."""
    made = meter("a")
    saw(made, event(Kind.LAUNCHED, 1, session=0), 0)
    read(made, 10, reading(n=100, session=0, total=100), boot_id="a")
    read(made, 20, reading(n=150, session=0, total=150), boot_id="a")
    made.boot("b")
    assert made._streams == {}
    read(made, 30, reading(n=999, total=999), boot_id="a")
    read(made, 40, reading(n=7, total=7), boot_id="b")
    assert made.totals.n_decoded == 50 + 7


READINGS = st.builds(
    SlotReading,
    slot=st.integers(0, 2),
    task=st.integers(-1, 6),
    session=st.integers(0, 3),
    fill=st.booleans(),
    n_decoded=st.integers(0, 200),
    us_decode=st.integers(0, 5 * SECOND),
    totals=st.builds(SlotTotals, *[st.integers(0, 10_000)] * 3),
)
EVENTS = st.builds(
    SlotEvent,
    kind=st.sampled_from(list(Kind)),
    req=st.integers(0, 6),
    index=st.just(0),
    session=st.integers(0, 3),
    seq=st.none(),
    task=st.integers(-1, 6),
    slot=st.integers(-1, 2),
    fill=st.booleans(),
    n_prompt=st.integers(-1, 100),
    n_cached=st.integers(-1, 100),
    n_decoded=st.integers(-1, 200),
    t_us=st.integers(0, 100),
    us_queued=st.integers(-5, 10),
    us_prompt=st.integers(-5, 10),
    us_decode=st.integers(-5, 5 * SECOND),
)
STEPS = st.one_of(EVENTS, st.lists(READINGS, max_size=3), st.sampled_from(["a", "b"]), st.integers(1, 3))


@given(st.lists(STEPS, max_size=40), st.lists(st.floats(0, 100), min_size=40, max_size=40))
def test_whatever_the_engine_says_every_figure_is_finite_or_none(steps: list, times: list[float]) -> None:
    """Events in any order, counters that fall, other boots, our own clock in disorder: no exception, no NaN, nothing negative."""
    made = meter("a")
    grown = 0
    for n, (step, now) in enumerate(zip(steps, times, strict=False)):
        if isinstance(step, SlotEvent):
            turn = saw(made, step, now)
            figures = [turn.queue_s, turn.ttft_s, turn.prompt_tps, turn.tps, turn.tpot_s]
            assert all(value is None or (isfinite(value) and value >= 0) for value in figures)
        elif isinstance(step, list):
            read(made, n, *step, now=now, boot_id="a")
        elif isinstance(step, str):
            made.boot(step)
        else:
            made.forget(step)
        shown = [made.tps(owner, now) for owner in range(-8, 4)] + [made.aggregate_tps(now), made.prompt_tps(now)]
        assert all(value is None or (isfinite(value) and value >= 0) for value in shown)
        assert made.totals.n_decoded >= grown
        grown = made.totals.n_decoded
    assert len(made._speeds) <= 3 + 3 + 7


@given(
    st.integers(2, 400),
    st.integers(SAMPLE_US, 500_000),
    st.lists(st.floats(0, 1), max_size=12),
)
def test_however_the_readings_fall_tokens_in_are_tokens_out(n_tokens: int, us_each: int, looks: list[float]) -> None:
    """A steady turn that is read at any moments gives the same pace and the same totals as one that is read once."""
    once, often = meter(), meter()
    moments = sorted({int(look * n_tokens) for look in looks} | {n_tokens})
    for made, seen in ((once, [n_tokens]), (often, moments)):
        saw(made, event(Kind.LAUNCHED), 0)
        read(made, 0, SlotReading(0, 1, 1, 5))
        for n in seen:
            us = max(1, (n - 1) * us_each) if n else 0
            read(made, us + 1, reading(n=n, us=us), now=us / 1e6)
        saw(made, event(Kind.RELEASED, t_us=10**12, n_decoded=n_tokens, us_decode=(n_tokens - 1) * us_each), 0)
    assert often.tps(5, 0) == pytest.approx(once.tps(5, 0), rel=1e-9)
    assert often.tps(5, 0) == pytest.approx(1e6 / us_each, rel=1e-9)
    assert often.totals == once.totals


def test_the_mean_of_nothing_is_nothing() -> None:
    """And of something it is the mean."""
    assert mean([]) is None
    assert mean([1.0, 3.0]) == 2.0


def test_a_request_whose_end_was_missed_leaves_nothing() -> None:
    """Its slot was given to another before anybody said that it was over."""
    made = meter()
    for task in range(1, 20):
        saw(made, event(Kind.LAUNCHED, task, session=0, t_us=task))
        read(made, 10 * task, reading(task=task, session=0))
    assert len(made._speeds) == len(made._streams) == 1
