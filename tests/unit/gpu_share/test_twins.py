"""The C++ and the Python version of layout and schedule say the same."""

from __future__ import annotations

import ctypes
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.gpu_share import layout, schedule
from polykv_proxy.gpu_share.schedule import Turn
from tests import native
from tests.unit.gpu_share.registries import NOW, torn

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
    sources = [native.OURS / "gpu-share-layout.cpp", native.OURS / "gpu-share-schedule.cpp", native.CPP / "gpu_share_capi.cpp"]
    return ctypes.CDLL(str(native.shared_object("gpu_share", sources)))


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


@given(
    period=st.integers(80_000, 400_000),
    begin=st.integers(0, 40_000),
    length=st.integers(25_000, 79_000),
    step=st.integers(100, 30_000),
)
def test_a_peer_uses_what_it_is_given_to_within_one_step_and_never_runs_more_than_one_over(
    twin: ctypes.CDLL, period: int, begin: int, length: int, step: int
) -> None:
    used, over = ctypes.c_int64(), ctypes.c_int64()
    length = min(length, period - begin)
    n_periods = 50
    numbers = [ctypes.c_int64(value) for value in (begin, begin + length, period, n_periods, step)]
    twin.capi_run(*numbers, ctypes.byref(used), ctypes.byref(over))
    assert over.value <= step
    given = n_periods * length
    if length < 16 * step and 2 * step <= length:
        assert abs(used.value - given) <= 2 * step
    else:
        assert given <= used.value + 2 * step
        assert used.value <= given + n_periods * step
