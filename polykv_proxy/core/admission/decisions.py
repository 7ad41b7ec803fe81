"""What was decided of late, and how often by which arm.

Law: the ring holds the last so many ends and no more; counts only grow. One that waited appears once, with its wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from polykv_proxy.core.admission.verdict import Arm, Outcome, Verdict

RING = 1000


@dataclass(frozen=True, slots=True)
class Decision:
    """One entry: the end of one request's asking. `number` grows by one with each."""

    number: int
    at: float
    session: str | None
    verdict: Verdict


class Decisions:
    """The ring and the counts."""

    def __init__(self, size: int = RING) -> None:
        self._ring: deque[Decision] = deque(maxlen=size)
        self._n = 0
        self.ends: Counter[tuple[Arm, Outcome]] = Counter()
        """Of all requests that were decided."""
        self.holds: Counter[Arm] = Counter()
        """Of all that had to wait, by the arm that made them."""
        self.would: Counter[tuple[Arm, Outcome]] = Counter()
        """Of advisory policies: what enforced ones would have done."""

    def __iter__(self) -> Iterator[Decision]:
        """The oldest first."""
        return iter(list(self._ring))

    def __len__(self) -> int:
        return len(self._ring)

    def held(self, verdict: Verdict) -> None:
        """Somebody begins to wait."""
        self.holds[verdict.finding.arm] += 1

    def end(self, verdict: Verdict, session: str | None, now: float) -> None:
        """It is decided."""
        self._n += 1
        self._ring.append(Decision(self._n, now, session, verdict))
        self.ends[verdict.finding.arm, verdict.outcome] += 1
        if verdict.would is not None:
            self.would[verdict.finding.arm, verdict.would] += 1
