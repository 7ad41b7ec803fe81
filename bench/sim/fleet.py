"""The work: packages of turns, each a prompt's growth, an answer and a gap; and what came of it.

Law: a package is a function of its seed, so that every policy gets the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median


@dataclass(frozen=True, slots=True)
class Turn:
    """`n_prompt` new prompt tokens, `n_answer` tokens of answer, and `gap_s` until the next turn: a tool at work."""

    n_prompt: int
    n_answer: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """Packages, and the prefix that all share."""

    packages: Sequence[Sequence[Turn]]
    n_prefix: int = 2000

    @property
    def n_tokens(self) -> int:
        return sum(turn.n_answer for package in self.packages for turn in package)


@dataclass(frozen=True, slots=True)
class Shape:
    """Means and spans of some work. Half of the agents' time or so goes to gaps, as with tools that compile, search or fetch."""

    n_packages: int = 12
    n_turns: tuple[int, int] = (10, 30)
    first_prompt: tuple[int, int] = (200, 800)
    later_prompt: tuple[int, int] = (30, 300)
    answer_mean: float = 200.0
    gap_mean_s: float = 4.0


def work_of(shape: Shape, seed: int) -> Work:
    """Answers and gaps are exponential beyond a least length: many short ones, some long."""
    source = Random(seed)
    packages = []
    for _ in range(shape.n_packages):
        turns = []
        for number in range(source.randint(*shape.n_turns)):
            prompt = source.randint(*(shape.later_prompt if number else shape.first_prompt))
            answer = 16 + int(source.expovariate(1 / (shape.answer_mean - 16)))
            turns.append(Turn(prompt, min(answer, 2000), source.expovariate(1 / shape.gap_mean_s)))
        packages.append(turns)
    return Work(packages)


@dataclass(slots=True)
class Result:
    """What one run of a fleet came to. Seconds; `turns_kept` is the part of turns at or above the floor."""

    wall_s: float = 0.0
    under_s: float = 0.0
    deep_s: float = 0.0
    n_tokens: int = 0
    deliveries: list[float] = field(default_factory=list)
    turnarounds: list[float] = field(default_factory=list)
    turn_tps: list[float] = field(default_factory=list)
    sessions_tps: list[float] = field(default_factory=list)
    n_held: int = 0
    n_refused: int = 0
    n_guaranteed: int = 0
    n_running: list[int] = field(default_factory=list)
    """Sessions that were in, at each look."""
    errors: list[float] = field(default_factory=list)
    """Of forecasts, relative: the mean when an admission had settled, against what was projected for it."""

    def figures(self, floor: float) -> dict[str, float]:
        """Flat, for a table."""
        return {
            "wall_s": self.wall_s,
            "under_floor_s": self.under_s,
            "deep_under_floor_s": self.deep_s,
            "delivery_p50_s": median(self.deliveries),
            "turnaround_p50_s": median(self.turnarounds),
            "goodput_sessions": sum(tps >= floor for tps in self.sessions_tps) / len(self.sessions_tps),
            "goodput_turns": sum(tps >= floor for tps in self.turn_tps) / len(self.turn_tps),
            "tokens_per_s": self.n_tokens / self.wall_s,
            "held": float(self.n_held),
            "refused": float(self.n_refused),
            "guaranteed": float(self.n_guaranteed),
            "most_sessions": float(max(self.n_running)),
        }
