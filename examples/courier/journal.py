"""What happened in one run: the proxy's reports, what the courier did, the turns of its workers, and what that comes to.

Law: times are seconds of the proxy's clock since the first report. Figures come from what was noted and from nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from examples.courier.proxy import Capacity


@dataclass(frozen=True, slots=True)
class Event:
    """`spawn`, `delivered`, `refused`, `failed`; from the proxy's decisions `hold`, `guarantee`, `overcommit`, `admit`.

    `value`: of `hold` the seconds, of `admit` the mean that was projected.
    """

    t: float
    kind: str
    session: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer as its worker saw it. `n_prompt`: prompt tokens that had to be computed; `seconds`: since the first token."""

    session: str
    t: float
    ttft_s: float
    seconds: float
    n_prompt: int
    n_answer: int

    @property
    def tps(self) -> float | None:
        """Tokens after the first by the time since it; None for a single one."""
        return (self.n_answer - 1) / self.seconds if self.n_answer > 1 and self.seconds > 0 else None


@dataclass(slots=True)
class Journal:
    """One run before a floor. `clock`: a steady one, for the time since the last report."""

    floor: float
    clock: Callable[[], float] = time.monotonic
    reports: list[Capacity] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    _heard_at: float = 0.0

    def report(self, said: Capacity) -> None:
        """A look at the pool."""
        self.reports.append(said)
        self._heard_at = self.clock()

    @property
    def now(self) -> float:
        """By the proxy's clock."""
        return self.since(self.reports[-1].ts) + self.clock() - self._heard_at

    def since(self, ts: float) -> float:
        """Of a time of the proxy."""
        return ts - self.reports[0].ts

    def note(self, kind: str, session: str) -> None:
        """The courier did something."""
        self.events.append(Event(self.now, kind, session))

    def decided(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """What the proxy decided, oldest first; of sessions that the courier started."""
        ours = {event.session for event in self.events if event.kind == "spawn"}
        for one in decisions:
            if one["session_id"] not in ours or one["outcome"] not in {"admitted", "warned"}:
                continue
            t, arm = self.since(one["ts"]), one["arm"]
            if one["waited_ms"]:
                self.events.append(Event(t - one["waited_ms"] / 1000, "hold", one["session_id"], one["waited_ms"] / 1000))
            if arm in {"guarantee", "overcommit"}:
                self.events.append(Event(t, arm, one["session_id"]))
            elif arm == "none" and one["value"] is not None:
                self.events.append(Event(t, "admit", one["session_id"], one["value"]))
        self.events.sort(key=lambda event: event.t)

    # -- what it comes to -------------------------------------------------------------------------------------------------

    def under_s(self, part: float = 1.0) -> float:
        """Seconds in which the mean was below that part of the floor."""
        return sum(
            after.ts - before.ts
            for before, after in pairwise(self.reports)
            if before.mean_active_tps is not None and before.mean_active_tps < part * self.floor
        )

    def settle_bands(self) -> list[tuple[float, float]]:
        """From when to when an admission settled."""
        bands: list[tuple[float, float]] = []
        for before, after in pairwise(self.reports):
            if before.settling:
                begin, end = self.since(before.ts), self.since(after.ts)
                bands[-1:] = [(bands[-1][0], end)] if bands and bands[-1][1] == begin else [*bands[-1:], (begin, end)]
        return bands

    def forecasts(self) -> list[tuple[float, float]]:
        """Projected and realised mean of each admission that settled before the next began."""
        begins = [event.t for event in self.events if event.kind in {"admit", "guarantee", "overcommit"}]
        found = []
        for admit in (event for event in self.events if event.kind == "admit"):
            until = min((t for t in begins if t > admit.t), default=float("inf"))
            after = (said for said in self.reports if admit.t < self.since(said.ts) <= until)
            realised = next((said.mean_active_tps for said in after if _settled(said)), None)
            if realised and admit.value is not None:
                found.append((admit.value, realised))
        return found

    def figures(self) -> dict[str, float | None]:
        """Flat; None for what there was nothing to tell from. A delivery counts from when the session was let in."""
        count = Counter(event.kind for event in self.events)
        let_in = {event.session: event.t for event in self.events if event.kind == "spawn"}
        let_in |= {event.session: event.t + event.value for event in self.events if event.kind == "hold" and event.value}
        delivered = {event.session: event.t for event in self.events if event.kind == "delivered"}
        wall_s = max([*delivered.values(), self.since(self.reports[-1].ts)])
        turns = [turn.tps for turn in self.turns if turn.tps is not None]
        errors = [abs(projected / realised - 1) for projected, realised in self.forecasts()]
        return {
            "wall_s": wall_s,
            "under_floor_s": self.under_s(),
            "deep_under_floor_s": self.under_s(0.5),
            "delivery_p50_s": _median([delivered[session] - let_in[session] for session in delivered]),
            "turnaround_p50_s": _median(list(delivered.values())),
            "sessions_at_floor": _part(self._session_tps(), self.floor),
            "turns_at_floor": _part(turns, self.floor),
            "tokens_per_s": sum(turn.n_answer for turn in self.turns) / wall_s if wall_s > 0 else None,
            "delivered": count["delivered"],
            "failed": count["failed"],
            "held": count["hold"],
            "refused": count["refused"],
            "guaranteed": count["guarantee"],
            "overcommitted": count["overcommit"],
            "forecasts": len(errors),
            "forecast_error": _median(errors),
        }

    def as_object(self) -> dict[str, Any]:
        """JSON-ready: the figures, and all that they are from."""
        return {
            "floor": self.floor,
            "figures": self.figures(),
            "events": [asdict(event) for event in self.events],
            "turns": [{**asdict(turn), "tps": turn.tps} for turn in self.turns],
            "reports": [{"t": self.since(said.ts), **asdict(said)} for said in self.reports],
        }

    def _session_tps(self) -> list[float]:
        timed: dict[str, list[Turn]] = {}
        for turn in self.turns:
            if turn.tps is not None:
                timed.setdefault(turn.session, []).append(turn)
        return [sum(turn.n_answer - 1 for turn in turns) / sum(turn.seconds for turn in turns) for turns in timed.values()]


def _settled(said: Capacity) -> bool:
    return not said.settling and said.n_warming == 0 and bool(said.mean_active_tps)


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _part(values: Sequence[float], floor: float) -> float | None:
    return sum(value >= floor for value in values) / len(values) if values else None
