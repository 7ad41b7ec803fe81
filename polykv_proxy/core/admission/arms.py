"""The arms: one test after the other, and the first that has something to say decides.

Law: pure. More load, fewer cells or a lower mean never turn a no into a yes. What is physical is never bypassed; a guarantee
bypasses headroom and floor, and waits for settling.
"""

from __future__ import annotations

from dataclasses import dataclass

from polykv_proxy.core.admission.forecast import Projection
from polykv_proxy.core.admission.load import Load
from polykv_proxy.core.admission.reservations import Need
from polykv_proxy.core.admission.verdict import Arm, Finding, Reason

KV_RESERVE = 0.05
"""Of all cells, so much stays free for the answers of those who run."""
PLENTY = 1_000_000
"""As many sessions as anybody can mean: where no arm sets a limit."""

OK = Finding(True, Arm.NONE, Reason.OK)


@dataclass(frozen=True, slots=True)
class Taken:
    """What is spoken for and not in the load yet, the newcomer not included."""

    slots: int = 0
    cells: int = 0


@dataclass(frozen=True, slots=True)
class Scope:
    """Where the session would begin: its sessions, its guarantee, its floor and what is known of its speed."""

    n_attached: int
    guarantee: int
    floor: float
    settling_s: float | None
    projection: Projection


def fits_at_all(load: Load, n_prefix: int, need: Need) -> Finding:
    """Could an empty engine take it? Answers stop at the end of the context, so only the prompt and a first token count."""
    whole = n_prefix + need.n_prompt + 1
    limit = load.n_ctx_slot
    if load.cells_per_stream is not None:
        limit = min(load.cells_per_stream, limit or load.cells_per_stream)
    if limit is not None and whole > limit:
        return Finding(False, Arm.NEVER_FITS, Reason.NEVER_FITS, whole, limit)
    together = n_prefix + need.n_slots * (need.n_prompt + 1)
    if load.has_cells and together > load.cells_total:
        return Finding(False, Arm.NEVER_FITS, Reason.NEVER_FITS, together, load.cells_total)
    return OK


def running(n_running: int, max_running: int | None) -> Finding:
    """The bound of the whole server."""
    if max_running is not None and n_running >= max_running:
        return Finding(False, Arm.RUNNING, Reason.RUNNING, n_running, max_running)
    return OK


def available(load: Load, taken: Taken) -> int:
    """Cells that are free or can be had, less what is spoken for; below zero when too much is."""
    return load.cells_free + load.cells_idle - taken.cells


def kv_headroom(load: Load, taken: Taken, need: Need) -> float | None:
    """The part of all cells that stays, with the newcomer in; None where cells are not shared or not counted."""
    return (available(load, taken) - need.cells) / load.cells_total if load.has_cells else None


def least(load: Load, taken: Taken, need: Need) -> int:
    """Cells that must be there: of the whole; where nothing runs of the prompt alone, for there will never be more."""
    alone = not load.slots_busy and not taken.slots and not taken.cells
    return min(need.cells, need.n_slots * (need.n_prompt + 1)) if alone else need.cells


def physical(load: Load, taken: Taken, need: Need) -> Finding:
    """1. Cells for it; 2. a stream of a split cache; 3. a slot."""
    wanted = least(load, taken, need)
    if load.has_cells and wanted > available(load, taken):
        return Finding(False, Arm.CONTEXT, Reason.CONTEXT, wanted, available(load, taken))
    if load.streams_free is not None and need.n_slots > load.streams_free - taken.slots:
        return Finding(False, Arm.STREAMS, Reason.STREAMS, load.streams_free - taken.slots, need.n_slots)
    free = load.slots_total - load.slots_busy - taken.slots
    if load.slots_total > 0 and need.n_slots > free:
        return Finding(False, Arm.SLOTS, Reason.SLOTS, free, need.n_slots)
    return OK


def examine(load: Load, taken: Taken, need: Need, scope: Scope, *, settled: bool) -> Finding:
    """May a new session begin here? `settled`: settling has held it long enough.

    1. What is physical; 2. below the guarantee: settling, else yes; 3. headroom of cells; 4. settling; 5. the floor.
    """
    found = physical(load, taken, need)
    if not found.ok:
        return found
    settling = Finding(False, Arm.SETTLING, Reason.SETTLING, scope.settling_s, 0.0)
    held = scope.settling_s is not None and not settled
    if scope.n_attached < scope.guarantee:
        return settling if held else Finding(True, Arm.GUARANTEE, Reason.GUARANTEE, scope.n_attached, scope.guarantee)
    headroom = kv_headroom(load, taken, need)
    if headroom is not None and headroom < KV_RESERVE:
        return Finding(False, Arm.KV, Reason.KV, headroom, KV_RESERVE)
    return settling if held else against_floor(scope.projection, scope.floor)


def against_floor(projection: Projection, floor: float) -> Finding:
    """Does the mean stay at or above the floor? A cold engine has nothing to lose."""
    if projection.unknown:
        return Finding(False, Arm.FLOOR, Reason.FLOOR_UNKNOWN, None, floor)
    if projection.used is None or projection.used >= floor:
        return Finding(True, Arm.NONE, Reason.OK, projection.used, floor)
    reason = Reason.FLOOR_IDLE if projection.idle else Reason.FLOOR
    return Finding(False, Arm.FLOOR, reason, projection.used, floor)


def room_by_matter(load: Load, taken: Taken, need: Need, *, reserve: bool) -> int:
    """How many sessions of this need the cells, streams and slots still take; `reserve`: what must stay free is kept free."""
    limits = [PLENTY]
    if load.has_cells and need.cells > 0:
        kept = KV_RESERVE * load.cells_total if reserve else 0
        first = int(not reserve and least(load, taken, need) <= available(load, taken))
        limits.append(max(first, int((available(load, taken) - kept) // need.cells)))
    if load.streams_free is not None:
        limits.append((load.streams_free - taken.slots) // need.n_slots)
    if load.slots_total > 0:
        limits.append((load.slots_total - load.slots_busy - taken.slots) // need.n_slots)
    return max(0, min(limits))
