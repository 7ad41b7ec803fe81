"""Requests with an Idempotency-Key: run once, answered alike for a day.

Law: the same key with the same body joins the running work or repeats its answer; with another body it is a conflict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.flight import Flight
from polykv_proxy.runtime.journal import IDEMPOTENCY_TTL_S, Reply

Result = TypeVar("Result")
Step = TypeVar("Step")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A key and the hash of what it was sent with."""

    key: str
    body_hash: str

    @classmethod
    def of(cls, key: str, target: str, body: bytes) -> Ticket:
        """The ticket of one request."""
        return cls(key, hashlib.sha256(target.encode() + b"\0" + body).hexdigest())


class IdempotencyDesk(Generic[Result, Step]):
    """Answers of the last day, and work in flight, by key."""

    def __init__(self, replies: tuple[Reply, ...] = ()) -> None:
        self._replies = {reply.key: reply for reply in replies}
        self.n_replayed = 0
        self._flying: dict[str, tuple[str, Flight[Result, Step]]] = {}

    def replay(self, ticket: Ticket, now: float) -> Reply | None:
        """The remembered answer. ApiError 409 when the key came with another body."""
        reply = self._replies.get(ticket.key)
        if reply is None:
            return None
        if now - reply.created_ts >= IDEMPOTENCY_TTL_S:
            del self._replies[ticket.key]
            return None
        self._same(ticket, reply.body_hash)
        self.n_replayed += 1
        return reply

    def join(self, ticket: Ticket, begin: Callable[[], Flight[Result, Step]]) -> Flight[Result, Step]:
        """The running work of this key, begun when there is none. ApiError 409 when it runs for another body."""
        flying = self._flying.get(ticket.key)
        if flying is not None and not flying[1].done:
            self._same(ticket, flying[0])
            return flying[1]
        flight = begin()
        self._flying = {key: entry for key, entry in self._flying.items() if not entry[1].done}
        self._flying[ticket.key] = (ticket.body_hash, flight)
        return flight

    def remember(self, reply: Reply) -> None:
        """Keep an answer; the journal has it already."""
        self._replies[reply.key] = reply

    def _same(self, ticket: Ticket, body_hash: str) -> None:
        if ticket.body_hash != body_hash:
            raise ApiError(
                "idempotency_mismatch",
                "this Idempotency-Key was sent before with another body; use a new key for a new request",
                param="Idempotency-Key",
            )
