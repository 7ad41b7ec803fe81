"""The life of an engine in one value: what observers, health page and relay are told.

Law: immutable; made by the supervisor (or the watcher of a foreign engine), read by everyone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class EngineState(Enum):
    """States of an engine. `failed` is not the end: a new attempt follows after a pause, or at once when asked for."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`since_ts` and `retry_ts` are Unix seconds. `restarts` counts starts after the first; `reason` says why it is not ready."""

    state: EngineState
    since_ts: float
    supervised: bool
    pid: int | None = None
    boots: int = 0
    restarts: int = 0
    reason: str | None = None
    exit_code: int | None = None
    retry_ts: float | None = None


Observer: TypeAlias = Callable[[EngineStatus], None]
"""Called on the event loop at each change of state; must not block or raise."""
