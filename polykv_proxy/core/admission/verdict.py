"""What was decided about a request, and on what ground.

Law: an arm is a metric label, a reason is for people and fixed: clients compare both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Arm(StrEnum):
    """The test that decided, in the order in which they are made."""

    NEVER_FITS = "never_fits"
    RUNNING = "max_running"
    CONTINUATION = "continuation"
    NO_POLICY = "no_policy"
    OVERCOMMIT = "overcommit"
    CONTEXT = "context"
    STREAMS = "streams"
    SLOTS = "slots"
    GUARANTEE = "guarantee"
    KV = "kv_headroom"
    SETTLING = "settling"
    FLOOR = "floor"
    LINE = "queue"
    NONE = "none"


class Outcome(StrEnum):
    """How it ended for a request; only HELD is not the end."""

    ADMITTED = "admitted"
    WARNED = "warned"
    HELD = "held"
    REJECTED = "rejected"
    TIMED_OUT = "timed_out"
    QUEUE_FULL = "queue_full"
    NEVER_FITS = "never_fits"
    CANCELLED = "cancelled"

    @property
    def admits(self) -> bool:
        """May it go to the engine?"""
        return self in {Outcome.ADMITTED, Outcome.WARNED}


class Reason(StrEnum):
    """All reasons. Those of the source documents are theirs to the letter."""

    OK = "ok"
    NEVER_FITS = "expected tokens exceed the context"
    RUNNING = "too many running requests"
    CONTINUATION = "known session"
    NO_POLICY = "no admission policy"
    OVERCOMMIT = "overcommit"
    CONTEXT = "context headroom exhausted"
    STREAMS = "no free stream (split cache)"
    SLOTS = "no free slot"
    GUARANTEE = "guaranteed minimum"
    KV = "kv headroom exhausted"
    SETTLING = "measurement settling"
    FLOOR = "projected mean tps below floor"
    FLOOR_IDLE = "projected mean tps below floor (idle estimate)"
    FLOOR_UNKNOWN = "mean tps unknown while sessions are warming"
    LINE = "others wait before"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look says: may it start, which arm decided, what that arm measured and against what."""

    ok: bool
    arm: Arm
    reason: Reason
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one request. `would`: what an advisory policy would have made of it, had it been enforced.

    `retry_after_s`: whole seconds, 1 to 60, set when it was refused for now; `should_retry` False when it is of no use.
    `position` (from 1), `expected_wait_s` and `deadline` are of those who are held.
    """

    req: int
    outcome: Outcome
    finding: Finding
    pool_id: int | None = None
    scope: int | None = None
    headroom_sessions: int | None = None
    mean_active_tps: float | None = None
    waited_s: float = 0.0
    retry_after_s: int | None = None
    should_retry: bool = True
    position: int | None = None
    expected_wait_s: float | None = None
    deadline: float | None = None
    would: Outcome | None = None

    @property
    def sessions_remaining(self) -> int | None:
        """For `x-sessions-remaining`, of those that were let in with a warning."""
        return self.headroom_sessions if self.outcome is Outcome.WARNED else None

    def finding_facts(self) -> dict[str, object]:
        """The ground of the decision, JSON-ready."""
        found = self.finding
        return {
            "arm": found.arm.value,
            "reason": found.reason.value,
            "value": found.value,
            "threshold": found.threshold,
            "headroom_sessions": self.headroom_sessions,
            "mean_active_tps": self.mean_active_tps,
        }

    def error_extra(self) -> dict[str, object]:
        """What the error object says beside the message."""
        return {**self.finding_facts(), "retry_after": self.retry_after_s}
