"""The self-check of a pool: at which positions it is looked at, by which prompts, and what the log-probs found there say.

Law: pure. A position p is the place after the first p tokens of the prefix; past its end, tokens of the prefix come again, so that
what is asked there looks at all of it. Two answers that only rounding tells apart are alike: by how much rounding does, two
computations without the pool say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from polykv_proxy.core.prefix import Tokens, as_tokens

LogProbs: TypeAlias = Mapping[int, float]
"""The best candidates for the next token, with their log-probabilities over the whole vocabulary."""

N_ASKED = 64
"""Candidates that are asked for."""
N_JUDGED = 10
"""Candidates of either side that are compared. The rest is mostly rounding."""
LEAST = 0.2
"""Least tolerance, in log-prob units. Measured: docs/pools.md, "Trust"."""
LEAST_QUANTISED = 1.0
"""The same on quantised weights. Two computations of a short prefix can agree to the bit while the pool's cells, which lie
elsewhere, round differently; so the floor alone says nothing there."""
FACTOR = 3.0
"""Tolerance in floors."""
UNLIKE = 100.0
"""Distance of answers that have nothing in common, or are not numbers."""

DEFAULT_POSITIONS = 12
MAX_POSITIONS = 1024
N_TAIL = 2
"""Positions past the end of the prefix."""
_GOLDEN = 0.6180339887498949


def choose_positions(prefix_len: int, own_start: int, longest: int, n: int, turn: int) -> tuple[int, ...]:
    """`n` positions at most, ascending, of prompts with at most `longest` tokens. `turn` counts the checks so far.

    1. past the end, as requests use the pool: everything is looked at; 2. where the pool's own part begins: only shared cells are;
    3. at the end; 4. the rest spread evenly, a quarter of it over the shared part. From turn to turn the spread moves, so that in
    time it comes by everywhere.
    """
    musts = [prefix_len + 1, own_start + 1, prefix_len, prefix_len + 2]
    found = {position for position in musts if 2 <= position <= longest}
    found = set([position for position in musts if position in found][:n])
    left = n - len(found)
    shared = _spread(2, own_start, left // 4, turn) if own_start > 1 else []
    own = _spread(max(2, own_start + 2), prefix_len - 1, left - len(shared), turn)
    return tuple(sorted(position for position in {*found, *shared, *own} if position <= longest))


def _spread(first: int, last: int, n: int, turn: int) -> list[int]:
    """`n` of the positions `[first, last]`, one in each of `n` equal parts."""
    width = last - first + 1
    if n <= 0 or width <= 0:
        return []
    if width <= n:
        return list(range(first, last + 1))
    return [first + int((part + (turn * _GOLDEN) % 1.0) * width / n) for part in range(n)]


def long_prompt(tokens: Tokens) -> Tokens:
    """The prefix and its tail: every prompt of a check is a beginning of this one."""
    size = int(tokens.size)
    return as_tokens(np.concatenate([tokens, tokens[[size * (i + 1) // (N_TAIL + 1) for i in range(N_TAIL)]]]))


@dataclass(frozen=True, slots=True)
class Step:
    """A prompt of `n_prompt` tokens; `compared`: its log-probs are wanted, and its last token is computed alone."""

    n_prompt: int
    compared: bool


def growing(positions: Sequence[int], *, halves: bool = False) -> Iterator[Step]:
    """Prompts that only grow, each going on where the last one ended; with `halves`, in more and smaller steps."""
    held = 0
    for position in positions:
        if halves and position - 1 - held > 1:
            yield Step(held + (position - 1 - held) // 2, compared=False)
        if position - 1 > held:
            yield Step(position - 1, compared=False)
        yield Step(position, compared=True)
        held = position


def shrinking(positions: Sequence[int], own_start: int) -> Iterator[Step]:
    """First all that is shared, then all, in two strides as the pool was computed; then back from position to position."""
    if 0 < own_start < positions[-1]:
        yield Step(own_start, compared=False)
    yield Step(positions[-1], compared=False)
    for position in reversed(positions):
        yield Step(position, compared=True)


def expected_cached(step: Step, held: int) -> int:
    """How many tokens of this prompt are not computed where the first `held` of all are kept: its last one always is."""
    return held if held < step.n_prompt else step.n_prompt - 1


def distance(a: LogProbs, b: LogProbs) -> float:
    """Largest difference over the best candidates of either side. One that the other side does not list is at best its last."""
    worst = 0.0 if a and b else UNLIKE
    for one, other in ((a, b), (b, a)):
        for token in sorted(one, key=lambda token: -one[token])[:N_JUDGED]:
            off = abs(one[token] - other[token]) if token in other else one[token] - min(other.values(), default=0.0)
            worst = max(worst, off) if off == off else UNLIKE  # noqa: PLR0124  not a number
    return min(worst, UNLIKE)


@dataclass(frozen=True, slots=True)
class Judgement:
    """How far the pool is from what was computed without it, a position each, and how far is too far."""

    distances: Mapping[int, float]
    tolerance: float

    @property
    def max_abs_diff(self) -> float:
        """The largest distance."""
        return max(self.distances.values(), default=0.0)

    @property
    def first_bad(self) -> int | None:
        """The first position that is too far off."""
        return min((position for position, off in self.distances.items() if off > self.tolerance), default=None)


def judge(pooled: Mapping[int, LogProbs], references: Sequence[Mapping[int, LogProbs]], *, quantised: bool = False) -> Judgement:
    """What the pool's answers say beside one or two computations without it.

    With two, a position is as far off as from the nearer one, and the floor is how far they are from one another. `quantised`: the
    model's weights are, and rounding is amplified.
    """
    distances = {position: min(distance(found, one[position]) for one in references) for position, found in pooled.items()}
    floor = 0.0
    if len(references) > 1:
        floor = max((distance(references[0][position], references[1][position]) for position in pooled), default=0.0)
    return Judgement(distances, max(LEAST_QUANTISED if quantised else LEAST, FACTOR * floor))
