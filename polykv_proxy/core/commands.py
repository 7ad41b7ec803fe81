"""What the core wants done: the shell runs these after the decision, in order.

Law: values only; a command names its object by id and carries all that its execution needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from polykv_proxy.core.pools import SeqRef


@dataclass(frozen=True, slots=True)
class FreeSeq:
    """Give a sequence back to the engine, if that is still the boot it belongs to."""

    seq: SeqRef
    boot_id: str


@dataclass(frozen=True, slots=True)
class EndSession:
    """Cancel a session's requests in the engine and free its cells."""

    number: int


@dataclass(frozen=True, slots=True)
class SavePool:
    """Write the pool's present record to the journal."""

    pool_id: int


@dataclass(frozen=True, slots=True)
class DropCopy:
    """Delete the file of a pool that is gone."""

    pool_id: int


@dataclass(frozen=True, slots=True)
class ExpirePool:
    """Release a pool whose `ttl_s` is over."""

    pool_id: int


Command: TypeAlias = FreeSeq | EndSession | SavePool | DropCopy | ExpirePool
