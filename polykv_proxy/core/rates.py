"""What computing, writing and reading cost here, from what was measured.

Law: pure. A rate is amount per second over the last measurements, each weighted by its length, so that short ones with their fixed
costs say little; before the first there is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PREFILL_ESTIMATE = 1000.0
"""Tokens per second. Any pool that was made since the start has replaced it."""
WRITE_ESTIMATE = 200e6
READ_ESTIMATE = 500e6
"""Bytes per second of a middling disk; the first file that is written and read replaces them."""
FADE = 0.8


class Rate:
    """Amount per second."""

    def __init__(self, estimate: float) -> None:
        self._estimate = estimate
        self._amount = self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Take in a measurement. What took no time says nothing."""
        if amount > 0 and seconds > 0:
            self._amount = FADE * self._amount + amount
            self._seconds = FADE * self._seconds + seconds

    @property
    def measured(self) -> bool:
        """Has anything been measured?"""
        return self._seconds > 0

    @property
    def per_s(self) -> float:
        """The rate; positive."""
        return self._amount / self._seconds if self.measured else self._estimate


@dataclass(frozen=True, slots=True)
class Rates:
    """Prompt tokens computed, bytes written and bytes read, per second."""

    prefill: Rate = field(default_factory=lambda: Rate(PREFILL_ESTIMATE))
    write: Rate = field(default_factory=lambda: Rate(WRITE_ESTIMATE))
    read: Rate = field(default_factory=lambda: Rate(READ_ESTIMATE))

    def copy_pays(self, n_tokens: int, n_bytes: int, *, written_in_passing: bool) -> bool:
        """Is a file cheaper than to compute these tokens again? Writing costs nothing while nobody waits for it."""
        reading = n_bytes / self.read.per_s
        writing = 0.0 if written_in_passing else n_bytes / self.write.per_s
        return reading + writing < n_tokens / self.prefill.per_s
