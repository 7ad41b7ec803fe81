"""Peers on a simulated device (`tests/cpp/gpu_share_sim.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from tests import native


class Kind(IntEnum):
    """What happens to a peer, or to the clock."""

    WORK = 0
    IDLE = 1
    KILL = 2
    STOP = 3
    CONTINUE = 4
    CLOCK = 5
    WEIGHT = 6


@dataclass(frozen=True, slots=True)
class Event:
    """At `at_s`; `value` is seconds of a clock that is set, or a weight."""

    at_s: float
    peer: int
    kind: Kind
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Steps that ended in the time that counts, the longest gap between two, when the last long one ended."""

    steps: int
    max_gap_ms: float
    last_long_s: float


class _Event(ctypes.Structure):
    _fields_ = [("t_us", ctypes.c_double), ("peer", ctypes.c_int32), ("kind", ctypes.c_int32), ("value", ctypes.c_double)]


class _Seen(ctypes.Structure):
    _fields_ = [("steps", ctypes.c_int64), ("max_gap_us", ctypes.c_double), ("last_long_us", ctypes.c_double)]


@cache
def library() -> ctypes.CDLL:
    """The pure part of GPU share and the simulation."""
    names = ("gpu-share-layout.cpp", "gpu-share-schedule.cpp", "gpu-share-member.cpp")
    sources = [*(native.OURS / name for name in names), native.CPP / "gpu_share_capi.cpp", native.CPP / "gpu_share_sim.cpp"]
    return ctypes.CDLL(str(native.shared_object("gpu_share", sources)))


def simulate(
    weights: Sequence[float],
    steps_ms: Sequence[float],
    events: Sequence[Event] | None = None,
    *,
    jitter: float = 0.0,
    from_s: float = 2.0,
    end_s: float = 12.0,
) -> list[Seen]:
    """All work from the beginning, or as `events` say. `jitter`: by what part steps are longer or shorter, at random."""
    n = len(weights)
    given = [Event(0.0, peer, Kind.WORK) for peer in range(n)] if events is None else events
    seen = (_Seen * n)()
    made = (_Event * len(given))(
        *(_Event(e.at_s * 1e6, e.peer, e.kind, e.value * (1e6 if e.kind == Kind.CLOCK else 1)) for e in given)
    )
    doubles = ctypes.c_double * n
    library().capi_simulate(
        n,
        doubles(*weights),
        doubles(*(step * 1000 for step in steps_ms)),
        len(given),
        made,
        ctypes.c_double(jitter),
        ctypes.c_double(from_s * 1e6),
        ctypes.c_double(end_s * 1e6),
        seen,
    )
    return [Seen(one.steps, one.max_gap_us / 1e3, one.last_long_us / 1e6) for one in seen]
