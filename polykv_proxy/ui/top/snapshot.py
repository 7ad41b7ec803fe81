"""What a running proxy says of itself at one moment.

Law: values only, as the routes gave them; what a proxy does not have (yet) is empty, never made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`trouble`: why there is nothing newer, in words. The rest: answers of the routes, of `savings` those of today."""

    trouble: str | None = None
    health: Facts = field(default_factory=dict)
    tree: Facts = field(default_factory=dict)
    tps: Facts = field(default_factory=dict)
    savings: Facts = field(default_factory=dict)
    admission: Facts = field(default_factory=dict)
    decisions: Facts = field(default_factory=dict)
    gpu: Facts = field(default_factory=dict)

    @property
    def pools(self) -> Sequence[Facts]:
        """All pools, by id."""
        found: Sequence[Facts] = self.tree.get("pools", [])
        return found

    def sessions(self) -> list[Facts]:
        """All sessions with their pool, those of pools first; what the speeds say of one is newer than what its pool says."""
        found: dict[str, dict[str, Any]] = {}
        for pool in self.pools:
            for session in pool["sessions"]:
                found[session_key(session)] = {**session, "pool_id": pool["pool_id"]}
        for session in self.tps.get("sessions", []):
            key = session_key(session)
            found[key] = {**found.get(key, {}), **session}
        return list(found.values())

    def kv_bytes(self) -> dict[str, int]:
        """The KV cache by owner: `pools`, `private`, `other`, and `free`, where the size of the cache is known."""
        engine = self.health.get("pools", {}).get("engine", {})
        total = int(self.tps.get("cells_total", 0) * engine.get("kv", {}).get("bytes_per_token", 0))
        own = sum(pool["own_kv_bytes"] for pool in self.pools)
        private = sum(session["marginal_kv_bytes"] for pool in self.pools for session in pool["sessions"])
        other = self.tree.get("other_kv_bytes", 0)
        used = {"pools": own, "private": private, "other": other}
        return {**used, "free": max(0, total - own - private - other)} if total else used

    def as_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "health": self.health,
            "tps": self.tps,
            "savings": self.savings,
            "admission": self.admission,
            "gpu": self.gpu,
            **self.tree,
        }


def session_key(session: Facts) -> str:
    """The same for the same session in all answers."""
    named = session["session_id"]
    return f"session {named}" if named is not None else f"request {session.get('req') or session.get('slot')}"
