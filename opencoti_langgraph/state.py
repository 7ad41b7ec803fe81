"""Capacity in graph state: the channels, their reducers, and routing by them.

Law: pure; values are plain dicts, numbers and words, so that checkpoints hold them. Of two reports the one with the larger `seq` is
the newer, whoever wrote it; parallel workers may all report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypedDict

from langchain_core.messages import BaseMessage

from opencoti_langgraph.results import Capacity

REPORTED = (
    "can_admit", "reason", "arm", "headroom_sessions", "mean_active_tps", "target_tps_per_session", "settling", "n_warming",
    "compaction_pressure", "expected_wait_ms", "seq", "ts",
)  # fmt: skip
"""What of a report goes into state."""


def newest(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> dict[str, Any]:
    """Reducer for reports: the larger `seq` stays. A report without one never replaces one that has it."""
    if not old or not new:
        return dict(new or old or {})
    return dict(new) if _age(new) >= _age(old) else dict(old)


def latest(_old: Any, new: Any) -> Any:
    """Reducer for flat keys: the last write stays, also of several in one step."""
    return new


def _age(report: Mapping[str, Any]) -> float:
    seq = report.get("seq")
    return float(seq) if isinstance(seq, int | float) else -1.0


class PoolState(TypedDict, total=False):
    """Channels that the gate, workers and routers share. Mix it into a graph's own state."""

    pool_id: Annotated[int | str | None, latest]
    capacity: Annotated[dict[str, Any], newest]
    capacity_ok: Annotated[bool, latest]
    headroom_sessions: Annotated[int, latest]
    mean_active_tps: Annotated[float | None, latest]


def report_of(capacity: Capacity) -> dict[str, Any]:
    """A report for the `capacity` channel."""
    facts = capacity.model_dump()
    return {name: facts[name] for name in REPORTED}


def report_of_reply(message: BaseMessage) -> dict[str, Any]:
    """What a model's reply said of room: for workers that report what they met. Empty where it said nothing."""
    headroom = message.response_metadata.get("headroom") or {}
    ours = message.response_metadata.get("opencoti") or {}
    known = {"headroom_sessions": headroom.get("sessions"), "mean_active_tps": ours.get("mean_active_tps"), "seq": ours.get("seq")}
    return {name: value for name, value in known.items() if value is not None}


def route_on_headroom(min_sessions: int = 1, *, enough: str = "spawn", below: str = "hold") -> Callable[[Mapping[str, Any]], str]:
    """A router for conditional edges: `enough` when the newest report has room for so many sessions, else `below`."""

    def route(state: Mapping[str, Any]) -> str:
        report = state.get("capacity") or {}
        headroom = report.get("headroom_sessions", state.get("headroom_sessions"))
        return enough if (headroom or 0) >= min_sessions and not report.get("settling") else below

    return route
