"""HTTP as both clients do it: addresses, answers, event streams and when to try again.

Law: no I/O. What is decided here is the same for the sync and the async client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from httpx_sse import ServerSentEvent

from opencoti_langgraph.calls import Call
from opencoti_langgraph.errors import PoolApiError, ProxyUnreachableError, from_answer

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:8080"
RETRIES = 2
"""How often a repeatable call is sent again after its connection broke."""
LONGEST_WAIT_S = 5.0
TIMEOUT = httpx.Timeout(None, connect=10.0)
"""Making a pool takes as long as its prefill; a proxy that does not answer at all is noticed at connect."""

STREAM_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
"""A stream that is alive sends something every 15 seconds; one that does not is opened again."""

_STATUS_OF_TYPE: Mapping[str, int] = {
    "invalid_request_error": 400,
    "not_found_error": 404,
    "conflict_error": 409,
    "rate_limit_error": 429,
    "not_supported_error": 501,
    "unavailable_error": 503,
    "timeout_error": 504,
}


def root_of(url: str) -> str:
    """The proxy's address, also from an OpenAI base URL."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def headers_of(api_key: str | None) -> dict[str, str]:
    """Headers that every call has."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def pause_s(attempt: int) -> float:
    """How long to wait before another try; `attempt` counts from 0."""
    return min(0.1 * 2.0**attempt, LONGEST_WAIT_S)


def result_of(call: Call[T], reply: httpx.Response) -> T:
    """The result, or PoolApiError."""
    if reply.is_success:
        return call.read(reply.json())
    raise error_of(reply, f"{call.method} {call.path}")


def error_of(reply: httpx.Response, where: str) -> PoolApiError:
    """The error that an answer is; its body has been read."""
    try:
        error = reply.json().get("error", {})
    except (ValueError, AttributeError):
        error = {}
    details: dict[str, Any] = dict(error) if isinstance(error, Mapping) else {"message": str(error)}
    if reply.headers.get("x-should-retry") == "false":
        details["should_retry"] = False
    wait = reply.headers.get("retry-after")
    if wait is not None and "retry_after" not in details:
        try:
            details["retry_after"] = float(wait)
        except ValueError:
            details["retry_after"] = 1.0  # a date: ask soon
    return from_answer(reply.status_code, details, where)


def error_in_stream(data: Mapping[str, Any], where: str) -> PoolApiError:
    """The error that ended a stream; its type says which status an answer would have had."""
    details = dict(data.get("error") or {})
    return from_answer(_STATUS_OF_TYPE.get(str(details.get("type")), 500), details, where)


def unreachable(url: str, error: BaseException) -> str:
    """The message for nobody at home."""
    return f"nobody answers at {url} ({type(error).__name__}: {error}); is polykv-proxy running there?"


@dataclass
class Position:
    """Where a watcher is in a stream of events, over reconnections."""

    params: dict[str, str]
    last_id: str | None = None
    attempt: int = 0
    connected: bool = False
    retry_s: float | None = None
    headers: dict[str, str] = field(default_factory=lambda: {"Accept": "text/event-stream"})

    def request_headers(self) -> dict[str, str]:
        """Headers of the next connection."""
        return {**self.headers, **({"Last-Event-ID": self.last_id} if self.last_id else {})}

    def took(self, event: ServerSentEvent) -> Any | None:
        """The data of an event that is one; None for `closing`, after which the stream is opened again."""
        self.attempt, self.connected = 0, True
        if event.id:
            self.last_id = event.id
        if event.retry is not None:
            self.retry_s = event.retry / 1000
        if event.event == "closing":
            return None
        return json.loads(event.data) if event.data else {}

    def broke(self, error: Exception, retries: int, url: str) -> None:
        """The connection is gone. An address where nobody ever answered is given up, a proxy that was there is waited for."""
        if self.connected or self.attempt < retries:
            return
        if isinstance(error, httpx.TransportError):
            raise ProxyUnreachableError(unreachable(url, error)) from error
        raise error

    def pause(self) -> float:
        """How long to wait before the stream is opened again."""
        wait = self.retry_s if self.retry_s is not None and not self.attempt else pause_s(self.attempt)
        self.attempt += 1
        return wait
