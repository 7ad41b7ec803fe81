"""What lies in the fake engine's cells, and the log-probs that come of it.

Law: equal contents give equal candidates, others give others. `rounding` moves them by the numbers of the cells, as offsets do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

N_CANDIDATES = 100


class Contents:
    """The contents of cells by their numbers. `spoils`: of every sequence that is made from now on one cell is wrong."""

    def __init__(self) -> None:
        self.rounding = 0.0
        self.spoils = False
        self._found: dict[int, int] = {}

    def write(self, cells: Sequence[int], tokens: Sequence[int]) -> None:
        """What was computed for these tokens lies in these cells."""
        self._found.update(zip(cells, tokens, strict=True))

    def copied(self, cells: Sequence[int], copies: list[int]) -> list[int]:
        """What lies in these cells lies in the copies too."""
        self.write(copies, [self._found[cell] for cell in cells])
        return copies

    def made(self, cells: Sequence[int], tokens: Sequence[int]) -> None:
        """The same, of a sequence."""
        self.write(cells, tokens)
        if self.spoils and cells:
            self.corrupt(cells[-1])

    def corrupt(self, cell: int) -> None:
        """Other KV lies there than was computed, for all who share the cell."""
        self._found[cell] += 1

    def candidates(self, cells: Sequence[int], n: int) -> list[dict]:
        """The `n` best for what comes after these cells, as the engine lists them."""
        if not n:
            return []
        dice = random.Random(repr([self._found[cell] for cell in cells]))
        moved = random.Random(repr(list(cells)))
        ids = dice.sample(range(16, 32_000), N_CANDIDATES)
        logits = [dice.gauss(0, 3) + moved.gauss(0, self.rounding) for _ in ids]
        total = math.log(sum(map(math.exp, logits)))
        ranked = sorted(zip(logits, ids, strict=True), reverse=True)[:n]
        return [{"id": id_, "token": f"<{id_}>", "logprob": logit - total} for logit, id_ in ranked]
