"""The engine as admission sees it: one moment's figures, whoever took them.

Law: plain values. What an admitted request will take and the figures do not show yet is the business of reservations.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Run:
    """A request in the engine: its slots, and the tokens that the furthest of them has decoded (0: still in its prompt)."""

    n_decoded: int = 0
    n_slots: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """`mean_active_tps`: over the `n_active` sessions that decode and have a figure. `n_warming`: all others that hold a slot.

    `cells_idle` can be had back from idle slots. A total of 0 is unknown, or of an engine without such a thing, and limits nothing.
    Streams are those of a split cache, None on a unified one. `runs`: by request number, all that the other figures include.
    """

    mean_active_tps: float | None = None
    n_active: int = 0
    n_warming: int = 0
    slots_total: int = 0
    slots_busy: int = 0
    cells_total: int = 0
    cells_free: int = 0
    cells_idle: int = 0
    streams_total: int | None = None
    streams_free: int | None = None
    cells_per_stream: int | None = None
    n_ctx_slot: int | None = None
    seq_ids_used: int = 0
    seq_ids_max: int = 0
    runs: Mapping[int, Run] = field(default_factory=dict)

    @property
    def split(self) -> bool:
        """Has each sequence cells of its own?"""
        return self.streams_total is not None

    @property
    def has_cells(self) -> bool:
        """Are cells shared by all, and counted?"""
        return self.cells_total > 0 and not self.split
