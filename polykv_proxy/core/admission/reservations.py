"""What admitted requests will take and the engine's figures do not show yet, and how long answers are.

Law: a reservation is made in the step that admits, newcomer included, and is given back once, whoever says how often that the
request is over. Nothing is ever counted in both: what a load shows of a request is no longer reserved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polykv_proxy.core.admission.load import Load

FIRST_ESTIMATE = 512
"""Tokens of an answer whose limit nobody gave, before any was seen."""
LEAST_ESTIMATE = 16
ALPHA = 0.1
DEVIATIONS = 2
"""An answer is charged with the mean length and so many mean deviations: most are shorter, and none is charged the whole window."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes: slots, and private tokens of each: of its prompt, and of its answer as far as anybody knows."""

    n_slots: int = 1
    n_prompt: int = 0
    n_answer: int = 0

    @property
    def cells(self) -> int:
        """Private cells of all its slots."""
        return self.n_slots * (self.n_prompt + self.n_answer)


@dataclass(frozen=True, slots=True)
class Reservation:
    """One admitted request. `scope` is that of its policy, None without one. `open_ended`: its caller set no limit.

    `n_answers`: how many it asked for, at a time or one after the other.
    """

    req: int
    session: str | None
    pool_id: int | None
    scope: int | None
    need: Need
    open_ended: bool = False
    n_answers: int = 1

    def cells(self, load: Load) -> int:
        """Cells still to come: of the whole until a first token is out, then of the rest of the answer."""
        run = load.runs.get(self.req)
        if run is None or run.n_decoded == 0:
            return self.need.cells
        return self.need.n_slots * max(0, self.need.n_answer - run.n_decoded)

    def slots(self, load: Load) -> int:
        """Slots still to come."""
        run = load.runs.get(self.req)
        return self.need.n_slots if run is None else max(0, self.need.n_slots - run.n_slots)


class Reservations:
    """All admitted requests that are not over."""

    def __init__(self) -> None:
        self._open: dict[int, Reservation] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._open.values())

    def make(self, reservation: Reservation) -> None:
        """From now on; a number is used once."""
        assert reservation.req not in self._open, "request numbers are not re-used"
        self._open[reservation.req] = reservation

    def give_back(self, req: int) -> Reservation | None:
        """The reservation, the first time; None ever after."""
        return self._open.pop(req, None)

    def cells(self, load: Load) -> int:
        """Cells that the load shows as free and that are spoken for."""
        return sum(one.cells(load) for one in self)

    def unseen(self, load: Load) -> int:
        """Streams that are on their way, of requests that the load does not show at all."""
        return sum(one.need.n_slots for one in self if one.req not in load.runs)

    def slots(self, load: Load) -> int:
        """Slots that the load shows as free and that are spoken for."""
        return sum(one.slots(load) for one in self)


@dataclass(slots=True)
class Answers:
    """How long the answers of one pool are."""

    mean: float | None = None
    deviation: float = 0.0

    def note(self, n_tokens: int) -> None:
        """One more was that long."""
        if self.mean is None:
            self.mean = float(n_tokens)
            return
        off = abs(n_tokens - self.mean)
        self.mean += ALPHA * (n_tokens - self.mean)
        self.deviation += ALPHA * (off - self.deviation)

    @property
    def estimate(self) -> int:
        """Tokens to charge for an answer of unknown length."""
        if self.mean is None:
            return FIRST_ESTIMATE
        return max(LEAST_ESTIMATE, round(self.mean + DEVIATIONS * self.deviation))
