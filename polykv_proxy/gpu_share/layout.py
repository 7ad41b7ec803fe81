"""The registry of a device as bytes: a 64-byte header, then 16 slots of 128 bytes, little-endian, in 4 KiB.

Law: pure. Any bytes of the right size can be parsed: slots are written while they are read, and a forged one must not do harm.
Times are microseconds since the Unix epoch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = b"OCGPU\0\0\0"
VERSION = 1
SIZE = 4096
N_SLOTS = 16
NAME_BYTES = 48

DEFAULT_WEIGHT = 1.0
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0

DEAD_AFTER_US = 3_000_000
"""A heartbeat older than this is that of a dead peer."""
AHEAD_US = 1_000_000
"""A heartbeat further ahead of the clock than this was not made by it."""

_HEADER = struct.Struct("<8sII48x")
_SLOT = struct.Struct("<IIqfIqI48s44x")


class LayoutError(Exception):
    """These bytes are not a registry of this version; the text says in what they differ."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A slot that somebody claimed. `claim` tells the claims of one slot apart."""

    slot: int
    pid: int
    claim: int
    boot_us: int
    weight: float
    active: bool
    heartbeat_us: int
    busy_ppm: int
    name: str

    def alive(self, now_us: int, step_us: int = 0) -> bool:
        """Its heart beats.

        `step_us`: by how much the clock has just been set; stamps from before count as well until they are renewed.
        """
        age = now_us - self.heartbeat_us
        return self.heartbeat_us >= 0 and (_fresh(age) or (step_us != 0 and _fresh(age - step_us)))


def _fresh(age_us: int) -> bool:
    return -AHEAD_US <= age_us <= DEAD_AFTER_US


def sound_weight(weight: float) -> float:
    """The weight itself, or the nearest one allowed; the default for what is no weight at all."""
    if not math.isfinite(weight) or weight <= 0:
        return DEFAULT_WEIGHT
    return min(max(weight, MIN_WEIGHT), MAX_WEIGHT)


def parse(buffer: bytes) -> tuple[Entry, ...]:
    """The claimed slots in their order. LayoutError: another size, magic, version or number of slots."""
    if len(buffer) != SIZE:
        raise LayoutError(f"{len(buffer)} bytes instead of {SIZE}")
    magic, version, n_slots = _HEADER.unpack_from(buffer)
    if magic != MAGIC:
        raise LayoutError(f"it begins with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise LayoutError(f"its layout has version {version}, this program knows version {VERSION}")
    if n_slots != N_SLOTS:
        raise LayoutError(f"it has {n_slots} slots instead of {N_SLOTS}")
    found = (_entry(buffer, slot) for slot in range(N_SLOTS))
    return tuple(entry for entry in found if entry.pid != 0)


def build(entries: Sequence[Entry]) -> bytes:
    """A registry that holds these entries."""
    buffer = bytearray(SIZE)
    _HEADER.pack_into(buffer, 0, MAGIC, VERSION, N_SLOTS)
    for entry in entries:
        _SLOT.pack_into(
            buffer,
            _HEADER.size + entry.slot * _SLOT.size,
            entry.pid,
            entry.claim,
            entry.boot_us,
            entry.weight,
            entry.active,
            entry.heartbeat_us,
            entry.busy_ppm,
            entry.name.encode()[: NAME_BYTES - 1],
        )
    return bytes(buffer)


def _entry(buffer: bytes, slot: int) -> Entry:
    pid, claim, boot_us, weight, active, heartbeat_us, busy_ppm, name = _SLOT.unpack_from(buffer, _HEADER.size + slot * _SLOT.size)
    text = name.partition(b"\0")[0].decode(errors="replace")
    printable = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return Entry(slot, pid, claim, boot_us, sound_weight(weight), active != 0, heartbeat_us, min(busy_ppm, 1_000_000), printable)
