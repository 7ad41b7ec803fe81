"""What has happened since the proxy started, counted: relayed requests, and what became of pools.

Law: only grows. Every label is a word of a fixed set, whatever callers and engines send.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from polykv_proxy.core.histogram import Histogram
from polykv_proxy.core.pools import Verdict

SHORT_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Bounds in seconds of what should take no time."""


class Ending(StrEnum):
    """How a relayed request ended."""

    __hash__ = str.__hash__  # each request is counted by it, and that of Enum is many times slower

    COMPLETE = "complete"
    """The engine's reply was relayed whole."""
    ENGINE_ERROR = "engine_error"
    """The same, and the reply was an error: a status of 400 or above, or an event that is one."""
    REFUSED = "refused"
    """Answered by the proxy in place of the engine."""
    CLIENT_GONE = "client_gone"
    ENGINE_LOST = "engine_lost"
    CUT = "cut"
    """Ended by the proxy while the engine was at it: a shutdown, the no-progress limit, a reply that is not HTTP."""


class Route(StrEnum):
    """Kinds of paths."""

    __hash__ = str.__hash__  # each request is counted by it, and that of Enum is many times slower

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    INFILL = "infill"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    AUDIO = "audio"
    OTHER = "other"


class Unwelcome(StrEnum):
    """Why a client's connection was ended: the code of the error that it was told."""

    MANY = "too_many_connections"
    SLOW = "request_timeout"
    LARGE = "header_too_large"
    MALFORMED = "invalid_request"
    """What it sent is not HTTP, or can be read in two ways."""


class RelayTally:
    """Relayed requests. `delay_s`: from when a request could go to the engine until it went; `plan_s`: in deciding for a pool."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[Route, Ending]] = Counter()
        self.n_opened = self.n_closed = 0
        """Connections of clients."""
        self.unwelcome: Counter[Unwelcome] = Counter()
        self.delay_s = Histogram(SHORT_S)
        self.plan_s = Histogram((*SHORT_S, 2.0, 5.0, 10.0, 30.0, 60.0))


class Rebuilt(StrEnum):
    """What became of the making of a pool's KV anew."""

    MADE = "made"
    RESTORED = "restored"
    """Read from disk."""
    FAILED = "failed"


class Evicted(StrEnum):
    """Why a pool gave up its KV."""

    ASKED = "asked"
    """By a caller: evict or flush."""
    ROOM = "room"
    """Sequence ids or cells had run out, or were about to."""
    ENGINE = "engine"
    """By the engine, for a request for which no cells were left."""


class Copied(StrEnum):
    """What became of copies of KV on disk."""

    WRITTEN = "written"
    READ = "read"
    REFUSED = "refused"
    """Damaged, foreign or gone: deleted, and the pool was computed."""
    FAILED = "failed"
    """Could not be written."""


class PoolTally:
    """What became of pools."""

    def __init__(self) -> None:
        self.copies: Counter[Copied] = Counter()
        self.rebuilds: Counter[Rebuilt] = Counter()
        self.evictions: Counter[Evicted] = Counter()
        self.checks: Counter[Verdict] = Counter()
