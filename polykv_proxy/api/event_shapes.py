"""The data of our server-sent events, as types: for the document, beside those of answers in shapes.py.

Law: shapes only, under the names of docs/http-api.md; more fields may come beside these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polykv_proxy.api import shapes
from polykv_proxy.core.admission.policy import Policy
from polykv_proxy.core.admission.verdict import Arm, Outcome, Reason
from polykv_proxy.core.events import SlotEventKind
from polykv_proxy.core.pools import Residency
from polykv_proxy.engine.status import EngineState
from polykv_proxy.runtime.news import Topic
from polykv_proxy.runtime.rows import PoolRow


@dataclass(frozen=True)
class Happening:
    """What every event of `/polykv/events` says."""

    seq: int
    ts: float


@dataclass(frozen=True)
class PoolEvent(Happening):
    """A pool came, changed or went."""

    type: Literal["created", "pinned", "unpinned", "released"] | Residency
    pool_id: int
    name: str | None
    parent: int | None
    prefix_len: int
    residency: Residency
    reason: str | None


@dataclass(frozen=True)
class SessionEvent(Happening):
    """A session came, changed or went."""

    type: Literal["opened", "attached", "detached", "warming", "active", "idle", "ended"]
    session_id: str
    pool_id: int | None
    n_streams: int


@dataclass(frozen=True)
class RequestEvent(Happening):
    """A station in the life of a request."""

    type: SlotEventKind
    req: int | None
    request_id: str | None
    index: int
    pool_id: int | None
    session_id: str | None
    slot: int | None
    n_prompt: int
    n_cached: int
    n_shared: int
    n_decoded: int
    miss: str | None
    reason: str | None
    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    prompt_tps: float | None
    tps: float | None


@dataclass(frozen=True)
class PeerEvent(Happening):
    """An engine on the device came, has another weight, or went."""

    type: Literal["joined", "weight", "left"]
    pid: int
    name: str
    slot: int
    weight: float
    gpu_key: str
    ours: bool


@dataclass(frozen=True)
class EngineEvent(Happening):
    """The engine is followed or not, or its process came into another state."""

    type: Literal["linked", "lost", "absent"] | EngineState
    boot_id: str | None
    reason: str | None


@dataclass(frozen=True)
class DecisionEvent(Happening):
    """What became of a request that a policy or bound was asked about."""

    type: Outcome
    req: int
    request_id: str | None
    session_id: str | None
    pool_id: int | None
    arm: Arm
    reason: Reason
    value: float | None
    threshold: float | None
    headroom_sessions: int | None
    mean_active_tps: float | None
    would: Outcome | None
    waited_ms: int
    position: int | None
    expected_wait_ms: int | None


@dataclass(frozen=True)
class PolicyEvent(Happening):
    """An admission policy, the default one where no pool is named."""

    type: Literal["set", "removed"]
    pool_id: int | None
    name: str | None
    policy: Policy


@dataclass(frozen=True)
class Resync:
    """Some that were asked for are gone; what comes next is newer than this number."""

    seq: int


@dataclass(frozen=True)
class Closing:
    """The last event: the proxy is being stopped."""

    reason: str


@dataclass(frozen=True)
class Making:
    """How far a new pool is; the first has its id alone."""

    pool_id: int
    total: int = 0
    cached: int = 0
    processed: int = 0
    t_ms: float = 0


SPEEDS: Mapping[str, Any] = {"tps": shapes.Speeds, "closing": Closing}
HAPPENINGS: Mapping[str, Any] = {
    Topic.POOL: PoolEvent,
    Topic.SESSION: SessionEvent,
    Topic.REQUEST: RequestEvent,
    Topic.PEER: PeerEvent,
    Topic.ENGINE: EngineEvent,
    Topic.DECISION: DecisionEvent,
    Topic.POLICY: PolicyEvent,
    "resync": Resync,
    "closing": Closing,
}
MAKING: Mapping[str, Any] = {"progress": Making, "done": PoolRow, "error": shapes.Failed}
