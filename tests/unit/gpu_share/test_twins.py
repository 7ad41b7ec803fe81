"""The C++ and the Python version of layout and schedule say the same."""

from __future__ import annotations

import ctypes
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.gpu_share import layout, schedule
from polykv_proxy.gpu_share.schedule import Turn
from tests.unit.gpu_share.registries import NOW, torn
from tests.unit.gpu_share.sim import library

TURNS = [Turn.FREE, Turn.RUN, Turn.WAIT]
steps = st.one_of(st.just(0), st.integers(-(10**10), 10**10))


class Found(ctypes.Structure):
    _fields_ = [
        ("slot", ctypes.c_int32),
        ("active", ctypes.c_int32),
        ("owner", ctypes.c_uint64),
        ("boot_us", ctypes.c_int64),
        ("heartbeat_us", ctypes.c_int64),
        ("weight", ctypes.c_double),
        ("busy_ppm", ctypes.c_uint32),
        ("alive", ctypes.c_int32),
        ("name", ctypes.c_char * 49),
    ]


@pytest.fixture(scope="module")
def twin() -> ctypes.CDLL:
    return library()


@given(buffer=torn(), now=st.integers(NOW - 10**7, NOW + 10**7), step=steps)
def test_both_read_the_same_entries(twin: ctypes.CDLL, buffer: bytes, now: int, step: int) -> None:
    found = (Found * layout.N_SLOTS)()
    n = twin.capi_read(buffer, ctypes.c_int64(now), ctypes.c_int64(step), found)
    ours = layout.parse(buffer)
    assert n == len(ours)
    for theirs, mine in zip(found, ours, strict=False):
        assert theirs.slot == mine.slot
        assert theirs.owner == mine.claim << 32 | mine.pid
        assert (theirs.boot_us, theirs.heartbeat_us, theirs.busy_ppm) == (mine.boot_us, mine.heartbeat_us, mine.busy_ppm)
        assert math.isclose(theirs.weight, mine.weight, rel_tol=0)
        assert bool(theirs.active) is mine.active
        assert bool(theirs.alive) is mine.alive(now, step)


@given(buffer=torn(), now=st.integers(NOW - 10**7, NOW + 10**7), step=steps)
def test_both_come_to_the_same_windows_and_verdicts(twin: ctypes.CDLL, buffer: bytes, now: int, step: int) -> None:
    made = schedule.make_schedule(schedule.participants(layout.parse(buffer), now, step))
    period, until = ctypes.c_int64(), ctypes.c_int64()
    out = (ctypes.c_int64 * 48)()
    n = twin.capi_schedule(buffer, ctypes.c_int64(now), ctypes.c_int64(step), ctypes.byref(period), out)
    assert (period.value, [tuple(out[3 * at : 3 * at + 3]) for at in range(n)]) == (
        made.period_us,
        [(window.slot, window.begin_us, window.end_us) for window in made.windows],
    )
    for slot in range(layout.N_SLOTS):
        turn = twin.capi_verdict(buffer, slot, ctypes.c_int64(now), ctypes.c_int64(step), ctypes.byref(until))
        assert schedule.Verdict(TURNS[turn], until.value) == schedule.verdict(made, slot, now)


@pytest.mark.parametrize("header", [b"", b"OCGPU\0\0\0\2\0\0\0\x10", b"OCGPU\0\0\0\1\0\0\0\x11", b"OCGPX\0\0\0\1\0\0\0\x10"])
def test_both_refuse_the_same_headers(twin: ctypes.CDLL, header: bytes) -> None:
    buffer = header.ljust(4096, b"\0")
    assert not twin.capi_check(buffer)
    with pytest.raises(layout.LayoutError):
        layout.parse(buffer)
    assert twin.capi_check(layout.build(()))
