"""Bytes of the registry."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.gpu_share import layout
from tests.unit.gpu_share.registries import NOW, entries, entry, torn

GOLDEN = Path(__file__).with_name("registry.bin")
"""Written once; the C++ program `tests/cpp/gpu_share_driver.cpp` writes the same bytes."""
GOLDEN_ENTRIES = (
    layout.Entry(0, 4242, 17, 1_700_000_000_000_001, 1.0, True, 1_700_000_100_000_002, 250_000, "first"),
    layout.Entry(1, 1, 4294967295, 1_700_000_000_500_000, 1.5, False, 1_700_000_099_900_000, 0, "smöl model.gguf"),
    layout.Entry(15, 4294967295, 1, 1, 0.25, True, 1_700_000_100_000_001, 1_000_000, "x" * 47),
)


def test_the_bytes_are_those_of_the_golden_file() -> None:
    assert GOLDEN.read_bytes() == layout.build(GOLDEN_ENTRIES)
    assert layout.parse(GOLDEN.read_bytes()) == GOLDEN_ENTRIES


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (b"", "0 bytes instead of 4096"),
        (bytes(4096), "it begins with"),
        (layout.build(()) + b"\0", "4097 bytes"),
        (b"OCGPU\0\0\0" + struct.pack("<II", 2, 16) + bytes(4080), "version 2"),
        (b"OCGPU\0\0\0" + struct.pack("<II", 1, 32) + bytes(4080), "32 slots"),
    ],
)
def test_what_is_no_registry_is_refused_with_what_is_wrong(buffer: bytes, said: str) -> None:
    with pytest.raises(layout.LayoutError, match=said):
        layout.parse(buffer)


@given(torn())
def test_whatever_the_slots_hold_is_parsed_into_sound_values(buffer: bytes) -> None:
    for found in layout.parse(buffer):
        assert found.pid != 0
        assert layout.MIN_WEIGHT <= found.weight <= layout.MAX_WEIGHT
        assert 0 <= found.busy_ppm <= 1_000_000
        assert found.name.isprintable()


@given(entries())
def test_what_is_written_is_read(written: list[layout.Entry]) -> None:
    parsed = {found.slot: found for found in layout.parse(layout.build(written))}
    assert list(parsed) == [one.slot for one in written if one.pid != 0]
    for one in written:
        if one.pid != 0:
            found = parsed[one.slot]
            assert (found.pid, found.claim, found.active, found.heartbeat_us) == (one.pid, one.claim, one.active, one.heartbeat_us)


@pytest.mark.parametrize(
    ("age_us", "step_us", "alive"),
    [
        (0, 0, True),
        (3_000_000, 0, True),
        (3_000_001, 0, False),
        (-1_000_000, 0, True),
        (-1_000_001, 0, False),
        (60_000_000, 60_000_000, True),
        (63_000_001, 60_000_000, False),
        (-60_000_000, -60_000_000, True),
        (500_000, 60_000_000, True),
    ],
)
def test_a_peer_is_alive_while_its_stamp_is_near_the_clock_of_before_or_after_a_step(
    age_us: int, step_us: int, alive: bool
) -> None:
    assert entry(0, age_us=age_us).alive(NOW, step_us) is alive


@given(st.floats())
def test_a_weight_is_always_sound(weight: float) -> None:
    sound = layout.sound_weight(weight)
    assert layout.MIN_WEIGHT <= sound <= layout.MAX_WEIGHT
    if math.isfinite(weight) and layout.MIN_WEIGHT <= weight <= layout.MAX_WEIGHT:
        assert sound == weight
