"""What was decided of late, and how often by which arm.

Law: the ring holds the last so many ends and no more; counts only grow. One that waited appears once, with its wait. What a pair
of arm and outcome may be is said here, so that whoever counts can begin at zero.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from polykv_proxy.core.admission.verdict import Arm, Outcome, Verdict
from polykv_proxy.core.histogram import Histogram

RING = 1000
WAITS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)

PASSES = (Arm.CONTINUATION, Arm.NO_POLICY, Arm.OVERCOMMIT, Arm.GUARANTEE, Arm.NONE)
"""Arms that only let in."""
BARS = (Arm.RUNNING, Arm.CONTEXT, Arm.STREAMS, Arm.SLOTS, Arm.KV, Arm.SETTLING, Arm.FLOOR, Arm.LINE)
"""Arms that hold or refuse; what an advisory policy says against is admitted by the same arms."""
ENDS = frozenset({
    (Arm.NEVER_FITS, Outcome.NEVER_FITS),
    *((arm, Outcome.ADMITTED) for arm in (*PASSES, *BARS)),
    *((arm, Outcome.WARNED) for arm in (Arm.KV, Arm.FLOOR)),
    *((arm, end) for arm in BARS for end in (Outcome.REJECTED, Outcome.TIMED_OUT, Outcome.QUEUE_FULL, Outcome.CANCELLED)),
})  # fmt: skip
ADVICE = frozenset((arm, would) for arm in BARS for would in (Outcome.HELD, Outcome.WARNED, Outcome.REJECTED))


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
        self.waits_s = Histogram(WAITS_S)
        """Of those who waited: until they were let in, refused, or gone."""
        self._waiting: set[int] = set()

    def __iter__(self) -> Iterator[Decision]:
        """The oldest first."""
        return iter(list(self._ring))

    def __len__(self) -> int:
        return len(self._ring)

    def held(self, verdict: Verdict) -> None:
        """Somebody begins to wait."""
        self.holds[verdict.finding.arm] += 1
        self._waiting.add(verdict.req)

    def end(self, verdict: Verdict, session: str | None, now: float) -> None:
        """It is decided."""
        self._n += 1
        self._ring.append(Decision(self._n, now, session, verdict))
        self.ends[verdict.finding.arm, verdict.outcome] += 1
        if verdict.req in self._waiting:
            self._waiting.remove(verdict.req)
            self.waits_s.add(verdict.waited_s)
        if verdict.would is not None:
            self.would[verdict.finding.arm, verdict.would] += 1
