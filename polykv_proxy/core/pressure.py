"""How near the wall is: whether contexts should be compacted before they no longer fit.

Law: pure; 0 is room enough, 1 is now.
"""

from __future__ import annotations

from collections.abc import Iterable

SCARCE = 0.25
"""The last quarter of all cells, and of the longest session's context, is where pressure rises."""


def compaction_pressure(n_free: int, n_cells: int, contexts: Iterable[tuple[int, int]]) -> float:
    """By free cells of all, or by the fullest context (tokens used, tokens in all), whichever presses more. 0..1."""
    fullest = max((used / total for used, total in contexts if total > 0), default=0.0)
    cells = 1 - n_free / (SCARCE * n_cells) if n_cells > 0 else 0.0
    return min(1.0, max(0.0, cells, (fullest - (1 - SCARCE)) / SCARCE))
