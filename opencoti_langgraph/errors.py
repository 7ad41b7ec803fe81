"""What can go wrong with pools, without LangChain.

Law: imports nothing but the standard library. Every answer of the proxy that is an error is one of these, by its status and code;
the chat model raises subclasses that are LangChain's and the OpenAI SDK's errors too (`chat_errors`).

    OpencotiError
    ├── PoolApiError              the proxy (or the engine behind it) answered an error
    │   ├── PoolNotFoundError     404: no such pool, or it was released
    │   ├── SessionNotFoundError  404: no such session
    │   ├── PoolConflictError     409: name taken, prefix differs, busy, pinned, has children, being released
    │   ├── PoolSaturatedError    429: no room, or below the floor; `retry_after` says when to come back
    │   ├── ContextExceededError  the prompt is longer than the context
    │   ├── PoolUnsupportedError  501, or a route that this proxy does not have
    │   └── PoolUnavailableError  502 to 504: the engine is starting, gone or standing still
    ├── ProxyUnreachableError     nobody answered
    └── GateClosedError           a capacity gate found no room in its time
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OVERFLOW_TYPES = frozenset({"exceed_context_size_error", "cannot_fit", "context_length_exceeded"})
"""Words for a prompt that does not fit, in `code` or `type`."""


class OpencotiError(Exception):
    """Base of all errors of this package."""


class ProxyUnreachableError(OpencotiError):
    """Nobody answered at the address; the message names it."""


class PoolApiError(OpencotiError):
    """An error answer. `details` is the whole error object, with counts and positions where the proxy gives them."""

    status: int | None
    code: str | None
    param: str | None
    message: str
    details: dict[str, Any]

    def __init__(self, message: str, status: int | None = None, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.note(status, details or {})

    def note(self, status: int | None, details: Mapping[str, Any]) -> None:
        """Take over what the answer said; subclasses with bases of their own call it instead of `__init__`."""
        self.status = status
        self.details = dict(details)
        code = self.details.get("code")
        self.code = code if isinstance(code, str) else self.details.get("type")
        self.param = self.details.get("param")

    @property
    def retry_after(self) -> float | None:
        """Seconds after which it makes sense to try again, as the answer said."""
        value = self.details.get("retry_after")
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def should_retry(self) -> bool:
        """False where the answer said that trying again is of no use (`fail_fast` policies)."""
        return self.details.get("should_retry") is not False

    def __str__(self) -> str:
        return f"{self.message} ({self.status}, {self.code})" if self.status else self.message


class PoolNotFoundError(PoolApiError):
    """404 `pool_not_found`: it never was, or it was released. Ids are never used again."""


class SessionNotFoundError(PoolApiError):
    """404 `session_not_found`."""


class PoolConflictError(PoolApiError):
    """409: the state of a pool or session forbids it; `code` says which way."""


class PoolSaturatedError(PoolApiError):
    """429: there is no room, or one more would push everybody below the floor."""

    @property
    def headroom_sessions(self) -> int | None:
        """How many more sessions fit, if the answer said so."""
        return self.details.get("headroom_sessions")

    @property
    def mean_active_tps(self) -> float | None:
        """Tokens per second of the sessions at work, if the answer said so."""
        return self.details.get("mean_active_tps")

    @property
    def pool_id(self) -> int | None:
        """The pool whose policy decided, if the answer said so."""
        return self.details.get("pool_id")

    @property
    def arm(self) -> str | None:
        """Which test decided (`floor`, `kv_headroom`, `settling`, `context`, …)."""
        return self.details.get("arm")


class ContextExceededError(PoolApiError):
    """The prompt is longer than the context: trying again does not help, a shorter prompt does."""

    @property
    def n_prompt_tokens(self) -> int | None:
        """Tokens of the prompt, if the answer said so."""
        return self.details.get("n_prompt_tokens")

    @property
    def n_ctx(self) -> int | None:
        """Tokens that fit, if the answer said so."""
        return self.details.get("n_ctx")


class PoolUnsupportedError(PoolApiError):
    """501, or a route that this proxy does not have: the message says what to do."""


class PoolUnavailableError(PoolApiError):
    """502, 503 or 504: the engine is starting, gone or standing still."""


class GateClosedError(OpencotiError):
    """A capacity gate found no room. `capacity` is the last report that it saw."""

    def __init__(self, message: str, capacity: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.capacity = dict(capacity)


_BY_CODE: Mapping[str, type[PoolApiError]] = {"session_not_found": SessionNotFoundError}
_BY_STATUS: Mapping[int, type[PoolApiError]] = {
    404: PoolNotFoundError,
    409: PoolConflictError,
    429: PoolSaturatedError,
    501: PoolUnsupportedError,
    502: PoolUnavailableError,
    503: PoolUnavailableError,
    504: PoolUnavailableError,
}
NO_ROUTE = frozenset({"not_found", "not_found_error", "method_not_allowed"})


def kind_of(status: int | None, details: Mapping[str, Any]) -> type[PoolApiError]:
    """The class of an error answer: by what it says, then by its status."""
    words = {word for word in (details.get("code"), details.get("type")) if isinstance(word, str)}
    if words & OVERFLOW_TYPES or "context_length_exceeded" in str(details.get("message")):
        return ContextExceededError
    for word in words:
        if word in _BY_CODE:
            return _BY_CODE[word]
    if status in {404, 405} and words & NO_ROUTE and "pool_not_found" not in words:
        return PoolUnsupportedError
    if status is None and words & {"saturated", "pool_saturated", "pool_seqs_exhausted"}:
        return PoolSaturatedError
    if status is None and words & {"engine_unavailable", "engine_starting", "draining", "engine_no_progress", "engine_protocol"}:
        return PoolUnavailableError
    return _BY_STATUS.get(status or 0, PoolApiError)


def from_answer(status: int, details: Mapping[str, Any], where: str) -> PoolApiError:
    """The error for an answer; `where` (verb and path) goes into the message when a route is missing."""
    kind = kind_of(status, details)
    message = str(details.get("message") or f"{where} answered {status}")
    if kind is PoolUnsupportedError and status in {404, 405}:
        message = f"{where}: this proxy has no such route; it is older than this package, or base_url is not a polykv-proxy"
    return kind(message, status, details)
