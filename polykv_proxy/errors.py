"""Errors of the proxy, and the one table that maps them to HTTP.

Law: imports nothing of ours. Only classes that someone catches.
The wire shape is OpenAI's `{"error": {message, type, code, param}}`.

    PolykvError
    ├── ApiError          an answer to a client: a code of KINDS, a message, perhaps a field and a wait
    ├── SettingsError     bad settings; found before anything starts; one line
    ├── JournalError      the journal could not be written; nothing was changed
    └── EngineError       the engine process or its protocol failed
        ├── EngineUnavailableError   no engine to talk to now: starting, lost or stopped
        ├── EngineRefusedError       the engine answered an error of its own
        └── EngineAbilityError       this engine has no verbs of ours, or a protocol that we do not know
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Kind:
    """HTTP status and OpenAI error type of one error code."""

    status: int
    type: str


_BAD = "invalid_request_error"
_BUSY = "rate_limit_error"
_AWAY = "unavailable_error"

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "invalid_request": Kind(400, _BAD),
        "invalid_api_key": Kind(401, "authentication_error"),
        "forbidden": Kind(403, "permission_error"),
        "not_found": Kind(404, "not_found_error"),
        "pool_not_found": Kind(404, "not_found_error"),
        "session_not_found": Kind(404, "not_found_error"),
        "method_not_allowed": Kind(405, _BAD),
        "request_timeout": Kind(408, _BAD),
        "conflict": Kind(409, "conflict_error"),
        "name_taken": Kind(409, "conflict_error"),
        "prefix_mismatch": Kind(409, "conflict_error"),
        "pool_busy": Kind(409, "conflict_error"),
        "pool_has_children": Kind(409, "conflict_error"),
        "pool_pinned": Kind(409, "conflict_error"),
        "pool_releasing": Kind(409, "conflict_error"),
        "session_not_resident": Kind(409, "conflict_error"),
        "idempotency_mismatch": Kind(409, "conflict_error"),
        "body_too_large": Kind(413, _BAD),
        "cannot_fit": Kind(422, _BAD),
        "template_not_splittable": Kind(422, _BAD),
        "upgrade_refused": Kind(426, _BAD),
        "saturated": Kind(429, _BUSY),
        "pool_seqs_exhausted": Kind(429, _BUSY),
        "too_many_pools": Kind(429, _BUSY),
        "header_too_large": Kind(431, _BAD),
        "internal_error": Kind(500, "server_error"),
        "engine_protocol": Kind(502, "server_error"),
        "journal_failed": Kind(507, "server_error"),
        "pools_unsupported": Kind(501, "not_supported_error"),
        "gpu_share_off": Kind(501, "not_supported_error"),
        "engine_starting": Kind(503, _AWAY),
        "engine_unavailable": Kind(503, _AWAY),
        "draining": Kind(503, _AWAY),
        "too_many_connections": Kind(503, _AWAY),
        "engine_no_progress": Kind(504, "timeout_error"),
    }
)
"""Every error code a client can get from us. Saturation is 429, never 503: 503: the engine, or we, are away."""


class PolykvError(Exception):
    """Base of all errors of ours."""


class ApiError(PolykvError):
    """An answer to a client. `code` is a key of KINDS; `extra` adds fields to the error object (counts, positions)."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        extra: Mapping[str, object] | None = None,
        more_headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.kind = KINDS[code]
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.extra = dict(extra or {})
        self.more_headers = tuple(more_headers)

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.kind.status

    @property
    def passing(self) -> bool:
        """May the same be possible later, without a change of what was asked for?"""
        return self.status == 429 or (self.status >= 500 and self.status != 501)

    def body(self) -> bytes:
        """JSON bytes of the answer."""
        return error_body(self.code, self.message, param=self.param, extra=self.extra)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer without its framing: the content type and, where waiting helps, `Retry-After` in whole seconds."""
        headers = [(b"content-type", b"application/json; charset=utf-8")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(retry_after(self.retry_after_s)).encode()))
        return [*headers, *self.more_headers]


class SettingsError(PolykvError):
    """Bad settings: the message says which, where it came from and what to write instead."""


class EngineError(PolykvError):
    """The engine process or its protocol failed."""


class EngineUnavailableError(EngineError):
    """There is no engine to talk to at the moment."""


class EngineRefusedError(EngineError):
    """The engine answered an error: its HTTP status, error type, message and field."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param


class EngineAbilityError(EngineError):
    """The engine lacks our verbs, or speaks a major version of them that we do not know. The message says which.

    `remedy`: what helps, where that does not depend on how the engine came to be ours.
    """

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


class JournalError(PolykvError):
    """The journal could not be written (disk full, folder gone); the change that asked for it did not happen."""


def retry_after(seconds: float) -> int:
    """`Retry-After` value: whole seconds, at least 1."""
    return max(1, math.ceil(seconds))


def error_object(
    code: str, message: str, *, param: str | None = None, extra: Mapping[str, object] | None = None
) -> dict[str, object]:
    """The OpenAI-shaped object of one error; `extra` never replaces the four fixed fields."""
    fixed = {"message": message, "type": KINDS[code].type, "code": code, "param": param}
    return {"error": {**(extra or {}), **fixed}}


def error_body(code: str, message: str, *, param: str | None = None, extra: Mapping[str, object] | None = None) -> bytes:
    """`error_object` as JSON bytes."""
    return json.dumps(error_object(code, message, param=param, extra=extra), ensure_ascii=False, separators=(",", ":")).encode()
