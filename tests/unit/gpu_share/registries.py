"""Registries for tests: sound ones, and any bytes at all."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

from polykv_proxy.gpu_share import layout

NOW = 1_800_000_000_000_000


def entry(slot: int, weight: float = 1.0, *, active: bool = True, age_us: int = 0, **fields: object) -> layout.Entry:
    known: dict[str, object] = {"pid": 100 + slot, "claim": 7, "boot_us": NOW - 10**9, "busy_ppm": 0, "name": f"peer {slot}"}
    return layout.Entry(slot=slot, weight=weight, active=active, heartbeat_us=NOW - age_us, **(known | fields))  # type: ignore[arg-type]


weights = st.one_of(
    st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 9.0, 0.0005, 5000.0, 0.0, -1.0, float("nan"), float("inf")]),
    st.floats(1 / 512, 1000, width=32),
    st.floats(width=32),
)
ages = st.one_of(st.integers(-2_000_000, 4_000_000), st.sampled_from([3_000_000, 3_000_001, -1_000_000, -1_000_001, NOW, 2 * NOW]))


@st.composite
def entries(draw: st.DrawFn) -> list[layout.Entry]:
    slots = draw(st.lists(st.integers(0, layout.N_SLOTS - 1), unique=True))
    return [
        entry(
            slot,
            draw(weights),
            active=draw(st.booleans()),
            age_us=draw(ages),
            pid=draw(st.integers(0, 2**32 - 1)),
            claim=draw(st.integers(0, 2**32 - 1)),
            busy_ppm=draw(st.integers(0, 2**32 - 1)),
            name=draw(st.text(max_size=20)).replace("\0", ""),
        )
        for slot in sorted(slots)
    ]


@st.composite
def torn(draw: st.DrawFn) -> bytes:
    """A registry in which anything may be written over the slots."""
    buffer = bytearray(layout.build(draw(entries())))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(64, 64 + 16 * 128 - 8))
        buffer[at : at + 8] = struct.pack("<Q", draw(st.integers(0, 2**64 - 1)))
    return bytes(buffer)
