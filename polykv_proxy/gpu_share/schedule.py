"""Who runs when on a shared device: every peer computes the same windows from the same registry and the clock of the host.

Law: pure, and whole numbers only, so that every peer comes to the same microsecond. The C++ twin is `gpu-share-schedule.cpp`.

1. Peers that are alive and active take part, in the order of their slots.
2. A share is proportional to the weight, but at least a tenth (with more than ten peers: all the same).
3. The period is the shortest in which the smallest share still is 40 ms, between 80 and 400 ms.
4. Windows tile the period in that order; it repeats from the Unix epoch on.
5. A step that has begun is not divided: it may run beyond its window, by less than itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from polykv_proxy.gpu_share.layout import Entry

FLOOR = 10
"""The smallest share is one of so many."""
SMALLEST_WINDOW_US = 40_000
MIN_PERIOD_US, MAX_PERIOD_US = 80_000, 400_000
WEIGHT_UNITS = 1000
"""Weights are compared in thousandths."""


@dataclass(frozen=True, slots=True)
class Window:
    """`[begin_us, end_us)` of each period belongs to the peer in this slot."""

    slot: int
    begin_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The windows of one period; fewer than two peers have no windows and no period."""

    period_us: int
    windows: tuple[Window, ...]


class Turn(Enum):
    """What a peer may do at this moment."""

    FREE = "free"
    RUN = "run"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`until_us`: the end of the window (run), its next beginning (wait), 0 (free)."""

    turn: Turn
    until_us: int


def participants(entries: Sequence[Entry], now_us: int, step_us: int = 0) -> tuple[Entry, ...]:
    """Those who share the device at this moment."""
    return tuple(entry for entry in entries if entry.active and entry.alive(now_us, step_us))


def shares(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """What each of the peers with these weights gets; together one."""
    parts, whole = _parts([round(weight * WEIGHT_UNITS) for weight in weights])
    return tuple(Fraction(part, whole) for part in parts)


def make_schedule(peers: Sequence[Entry]) -> Schedule:
    """The windows of peers that are given in the order of their slots."""
    if len(peers) < 2:
        return Schedule(0, ())
    parts, whole = _parts([round(peer.weight * WEIGHT_UNITS) for peer in peers])
    period = min(max(SMALLEST_WINDOW_US * whole // min(parts), MIN_PERIOD_US), MAX_PERIOD_US)
    windows: list[Window] = []
    begin, passed = 0, 0
    for peer, part in zip(peers, parts, strict=True):
        passed += part
        end = passed * period // whole
        windows.append(Window(peer.slot, begin, end))
        begin = end
    return Schedule(period, tuple(windows))


def verdict(schedule: Schedule, slot: int, now_us: int) -> Verdict:
    """What the peer in this slot may do. Who has no window runs freely: it is alone, or not on the list."""
    for window in schedule.windows:
        if window.slot == slot:
            start = now_us - now_us % schedule.period_us
            if start + window.begin_us <= now_us < start + window.end_us:
                return Verdict(Turn.RUN, start + window.end_us)
            ahead = start + window.begin_us
            return Verdict(Turn.WAIT, ahead if ahead > now_us else ahead + schedule.period_us)
    return Verdict(Turn.FREE, 0)


def _parts(units: list[int]) -> tuple[list[int], int]:
    """Numerators over one denominator. Who would get less than the floor gets it, and the others share the rest by weight."""
    if len(units) >= FLOOR:
        return [1] * len(units), len(units)
    floored: set[int] = set()
    while True:
        rest = sum(unit for at, unit in enumerate(units) if at not in floored)
        tenths = FLOOR - len(floored)
        below = {at for at, unit in enumerate(units) if at not in floored and tenths * unit < rest}
        if not below:
            return [rest if at in floored else tenths * unit for at, unit in enumerate(units)], FLOOR * rest
        floored |= below
