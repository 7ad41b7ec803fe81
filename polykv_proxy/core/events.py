"""What the engine tells the core, as values.

Law: plain data in the units of the engine protocol; parsing is the engine room's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from polykv_proxy.core.pools import SeqRef


class SlotEventKind(StrEnum):
    """Stations in the life of one task."""

    LAUNCHED = "launched"
    FIRST_TOKEN = "first_token"  # noqa: S105  the engine's word
    FINISHED = "finished"
    RELEASED = "released"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class SlotEvent:
    """One event of one task. `req` is 0 for requests that carried no number; `fill`: it generates nothing for anybody: a sequence
    is materialised, or a pool looked at.

    Durations by the engine's steady clock, 0 while unknown: `us_queued` from post to launch, `us_prompt` from launch to the first
    token (of a fill: to its end), `us_decode` from the first token to the last.
    """

    kind: SlotEventKind
    req: int
    index: int
    session: int
    seq: SeqRef | None
    task: int = -1
    slot: int = -1
    fill: bool = False
    n_prompt: int = 0
    n_cached: int = 0
    n_shared: int = 0
    n_decoded: int = 0
    miss: str | None = None
    reason: str | None = None
    t_us: int = 0
    us_queued: int = 0
    us_prompt: int = 0
    us_decode: int = 0


@dataclass(frozen=True, slots=True)
class SeqGivenUp:
    """The engine gave up an expendable sequence, because cells had run out."""

    seq: SeqRef


@dataclass(frozen=True, slots=True)
class SlotTotals:
    """What a slot did since the engine's boot; only grows."""

    n_decoded: int = 0
    n_prompt: int = 0
    n_cached: int = 0


@dataclass(frozen=True, slots=True)
class SlotReading:
    """A slot at one moment. `n_decoded` and `us_decode` are those of the task that runs in it; `task` is -1 without one."""

    slot: int
    task: int = -1
    req: int = 0
    session: int = 0
    fill: bool = False
    n_decoded: int = 0
    us_decode: int = 0
    totals: SlotTotals = SlotTotals()


@dataclass(frozen=True, slots=True)
class Counters:
    """Slots of one boot at one moment of the engine's clock; slots that did not change may be left out."""

    boot_id: str
    t_us: int
    slots: tuple[SlotReading, ...]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What `hello` said that decisions depend on."""

    boot_id: str
    fingerprint: str
    n_vocab: int
    n_ctx_slot: int
    max_pools: int
    prefix_sharing: str
    prefix_sharing_why: str


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What `state` said that decisions depend on: live sequences, and requests and sessions that hold a slot."""

    boot_id: str
    seqs: tuple[SeqRef, ...]
    reqs: frozenset[int]
    sessions: frozenset[int]
