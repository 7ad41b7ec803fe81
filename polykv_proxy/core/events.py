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
    """One event of one task. `req` is 0 for requests that carried no number."""

    kind: SlotEventKind
    req: int
    index: int
    session: int
    seq: SeqRef | None
    n_prompt: int = 0
    n_cached: int = 0
    n_shared: int = 0
    n_decoded: int = 0
    miss: str | None = None
    reason: str | None = None
    t_us: int = 0


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
