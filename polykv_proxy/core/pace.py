"""Tokens per second as averages that forget: the maths of one stream, and of an engine as a whole.

Law: pure values; every figure is finite or None, whatever comes in. What has no time, or goes backwards, is no sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, isfinite

WINDOW_S = 2.0
WINDOW_TOKENS = 128
"""A sample weighs by its time or by its tokens, whichever says more: 2 s or 128 tokens leave 37 % of what was before."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What one session experiences: tokens after the first of a turn, by the wall time since it. No value before the first sample.

    Tokens and time are averaged each for itself, and the value is their ratio: an average of rates would believe the tokens of
    a burst and forget the wait before it (ADR 12). It does not matter how a steady stream is cut into samples, and the value
    never leaves the range of the samples.
    """

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def value(self) -> float | None:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    def after(self, n_tokens: int, seconds: float) -> Pace:
        """With a sample more: so many tokens came within that time."""
        if n_tokens <= 0 or not 0 < seconds < float("inf"):
            return self
        span = max(seconds / WINDOW_S, n_tokens / WINDOW_TOKENS)
        keep, weight = exp(-span), -expm1(-span) / span
        after = Pace(self.tokens * keep + n_tokens * weight, self.seconds * keep + seconds * weight)
        return after if after.value is not None and isfinite(after.value) else self

    def waiting(self, seconds: float) -> float | None:
        """The value for somebody who has waited that long for the next token: what it would be if that came now, never more."""
        value = self.value
        if value is None or seconds * value <= 1:
            return value
        return self.after(1, seconds).value


@dataclass(frozen=True, slots=True)
class Rate:
    """What a whole engine does per second, from a count that only grows; time in which nothing happens counts like any other."""

    value: float = 0.0

    def after(self, amount: int, seconds: float) -> Rate:
        """With a sample more: the count grew by `amount` within that time."""
        if amount < 0 or not 0 < seconds < float("inf"):
            return self
        rate = amount / seconds
        return Rate(self.since(seconds) - rate * expm1(-seconds / WINDOW_S)) if isfinite(rate) else self

    def since(self, seconds: float) -> float:
        """The value after that long without anything new."""
        return self.value * exp(-max(0.0, seconds) / WINDOW_S)
