"""Tells when the clock of the host was set; the twin of `gpu_share_clock_watch` in the engine.

Law: pure. After a step stamps from before and after are both good until all peers have beaten again.
"""

from __future__ import annotations

STEP_US = 100_000
"""More than any slewing does between two looks."""
GRACE_US = 2_000_000


class ClockWatch:
    """Of one who looks. Times are in microseconds."""

    def __init__(self) -> None:
        self._offset: int | None = None
        self._step = 0
        self._until = 0

    def look(self, wall_us: int, mono_us: int) -> int:
        """By how much the clock was set a moment ago; 0: it was not."""
        offset = wall_us - mono_us
        moved = 0 if self._offset is None else offset - self._offset
        self._offset = offset
        if abs(moved) > STEP_US:
            self._step = moved + (self._step if mono_us < self._until else 0)
            self._until = mono_us + GRACE_US
        return self._step if mono_us < self._until else 0
