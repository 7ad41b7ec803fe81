"""What the routes need, in one value; who may call them; how bodies are read.

Law: made once by the composition root; routes get it as an argument, never from a global.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fastapi import Request

from polykv_proxy.api.local_names import LocalNames
from polykv_proxy.errors import ApiError
from polykv_proxy.observability.page import MetricsPage
from polykv_proxy.ports import Header
from polykv_proxy.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Keys:
    """API keys, any of which opens our verbs, and the admin key for admin verbs. Without keys everyone may call."""

    api: frozenset[str] = frozenset()
    admin: str | None = None

    @property
    def all(self) -> list[str]:
        """All that the engine must take; none without API keys, since then everyone may call."""
        return sorted(self.api | ({self.admin} if self.admin else frozenset())) if self.api else []

    def accepts(self, key: str | None) -> bool:
        """May the holder of this key use pools and sessions?"""
        if not self.api:
            return True
        return key is not None and _one_of(key, self.all)

    def accepts_any(self, keys: Iterable[str]) -> bool:
        """The same of the holder of several: no stranger has one that is right, whichever is looked at elsewhere."""
        return sum([self.accepts(key) for key in keys]) > 0

    def accepts_admin(self, key: str | None) -> bool:
        """May the holder of this key use admin verbs? Without an admin key the API key suffices."""
        if self.admin is None:
            return self.accepts(key)
        return key is not None and _one_of(key, frozenset({self.admin}))


def _one_of(key: str, keys: Iterable[str]) -> bool:
    """In a time that tells nothing of which key it is or how much of it is right."""
    return sum([hmac.compare_digest(_digest(key), _digest(other)) for other in keys]) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True, slots=True)
class ApiContext:
    """`health` gives the supervisor's facts for `/polykv/health`, JSON-ready; `details` of it are for holders of a key only.

    `default_pool`: to which requests that name none are attached. `metrics`: the page that extends the engine's, which is at
    `api_prefix`; None leaves that to the engine. `hosts`: the names by which we may be called; None: by any.
    """

    runtime: Runtime
    keys: Keys = field(default_factory=Keys)
    health: Callable[[], Mapping[str, object]] = field(default=dict)
    body_limit: int = 64 * 1024 * 1024
    default_pool: str | None = None
    metrics: MetricsPage | None = None
    api_prefix: str = ""
    hosts: LocalNames | None = None


def key_of(request: Request) -> str | None:
    """The key a request came with, in the forms that the engine takes; `Bearer` may be spelt in any case."""
    sent = request.headers.get("authorization") or request.headers.get("x-api-key")
    return sent[7:].strip() if sent is not None and sent[:7].lower() == "bearer " else sent


def engine_keys_of(headers: Iterable[Header]) -> frozenset[str]:
    """The key that the engine sees in these headers: Authorization, without it X-Api-Key, less a `Bearer ` in front.

    All of them where the field came with several values: which of them the engine takes is not for us to know.
    """
    found: dict[bytes, set[bytes]] = {b"authorization": set(), b"x-api-key": set()}
    for name, value in headers:
        found.get(name.lower(), set()).add(value)
    values = (found[b"authorization"] - {b""}) or found[b"x-api-key"] or {b""}
    return frozenset(value.decode("latin-1").removeprefix("Bearer ") for value in values)


def require_key(context: ApiContext, request: Request) -> None:
    """ApiError 401 without a valid key."""
    if not context.keys.accepts(key_of(request)):
        raise ApiError("invalid_api_key", "Invalid API Key")


def require_admin(context: ApiContext, request: Request, what: str) -> None:
    """ApiError 403 without the admin key, where there is one."""
    if not context.keys.accepts_admin(key_of(request)):
        raise ApiError("forbidden", f"{what} wants the admin key")


async def read_body(context: ApiContext, request: Request) -> bytes:
    """The whole body. ApiError 413 as soon as it is too long."""
    limit = context.body_limit
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ApiError("body_too_large", f"the body is longer than {limit} bytes")
        parts.append(part)
    return b"".join(parts)
