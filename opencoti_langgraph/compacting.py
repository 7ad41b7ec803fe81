"""Compaction by re-rooting: the rewritten context becomes a new branch of the stable ancestor, and the old branch goes.

Law: no I/O. The order is fork, then swap, then release: a crash between any two leaves a pool that its lease cleans up, never a
caller with the name of a dead pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opencoti_langgraph import calls
from opencoti_langgraph.calls import Call
from opencoti_langgraph.results import Pool, PoolRef, Released

GRACE_S = 60.0
"""How long the old subtree may live on unused, where nobody releases it."""


@dataclass(frozen=True, slots=True)
class Refork:
    """What came of it: the new pool, the old one's id, and the pools that are gone already."""

    pool: Pool
    old_id: int
    released: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReforkPlan:
    """The calls, in their order."""

    make: Call[Pool]
    old_id: int
    lease: Call[Pool]
    release: Call[Released]


def refork_calls(old: PoolRef, facts: Pool, new: Mapping[str, Any]) -> ReforkPlan:
    """How to put a rewritten prefix in the place of `old`. A root has no ancestor: the new pool is then a root too."""
    body = dict(new)
    grace_s = body.pop("grace_s", GRACE_S)
    ancestor = body.pop("ancestor", facts.parent)
    if "compacted_tokens" in body:
        body["tokens"] = body.pop("compacted_tokens")
    make = calls.create_pool(**body) if ancestor is None else calls.fork_pool(ancestor, **body)
    return ReforkPlan(
        make,
        facts.pool_id,
        calls.renew_pool(facts.pool_id, ttl_s=grace_s),
        calls.release_pool(facts.pool_id, recursive=True),
    )
