"""Where a request target belongs: to the engine, to us, or to nobody.

Law: pure; bytes in, one of five names out. The engine percent-decodes paths before it routes, so every decision here is made on the
decoded path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from polykv_proxy.core.tally import Route

_GENERATING = {
    b"/completion": Route.COMPLETIONS,
    b"/completions": Route.COMPLETIONS,
    b"/v1/completions": Route.COMPLETIONS,
    b"/chat/completions": Route.CHAT,
    b"/v1/chat/completions": Route.CHAT,
    b"/responses": Route.RESPONSES,
    b"/v1/responses": Route.RESPONSES,
    b"/v1/messages": Route.MESSAGES,
    b"/infill": Route.INFILL,
}
_POOLLESS = {
    b"/embedding": Route.EMBEDDINGS,
    b"/embeddings": Route.EMBEDDINGS,
    b"/v1/embeddings": Route.EMBEDDINGS,
    b"/rerank": Route.RERANK,
    b"/reranking": Route.RERANK,
    b"/v1/rerank": Route.RERANK,
    b"/v1/reranking": Route.RERANK,
    b"/audio/transcriptions": Route.AUDIO,
    b"/v1/audio/transcriptions": Route.AUDIO,
}
_KINDS = {**_GENERATING, **_POOLLESS}
_READS = frozenset({b"GET", b"HEAD"})
_ESCAPE = re.compile(rb"%(?:u([0-9A-Fa-f]{4})|([0-9A-Fa-f]{2}))")


class Where(Enum):
    """Who answers a request."""

    ENGINE = "engine"
    """Relayed as it came."""
    GENERATE = "generate"
    """Relayed, after the gate was asked."""
    POOLLESS = "poolless"
    """Relayed as it came, unless the gate objects to its fields: computes, but never from a pool."""
    OWN = "own"
    """Ours: goes to the ASGI application."""
    PRIVATE = "private"
    """The engine's private verbs: nobody's from here."""


@dataclass(frozen=True, slots=True)
class Routes:
    """`api_prefix` is the engine's `--api-prefix`; `own_exact` lists engine paths whose answer to GET is extended."""

    api_prefix: bytes = b""
    own_prefixes: tuple[bytes, ...] = (b"/polykv", b"/gpu")
    own_exact: frozenset[bytes] = frozenset()
    generating: frozenset[bytes] = field(init=False)
    poolless: frozenset[bytes] = field(init=False)
    _posts: dict[bytes, Where] = field(init=False)
    """Of the usual targets, spelled as usual: all others take the longer way."""
    _kinds: dict[bytes, Route] = field(init=False)

    def __post_init__(self) -> None:
        kinds = {self.api_prefix + path: kind for path, kind in _KINDS.items()}
        object.__setattr__(self, "generating", frozenset(self.api_prefix + path for path in _GENERATING))
        object.__setattr__(self, "poolless", frozenset(self.api_prefix + path for path in _POOLLESS))
        object.__setattr__(self, "_posts", {path: self._where(b"POST", path) for path in kinds})
        object.__setattr__(self, "_kinds", kinds)

    def where(self, method: bytes, target: bytes) -> Where:
        """1. a path with a segment `_polykv` is private. 2. own paths. 3. GET and HEAD on engine paths that we extend. 4. POST on
        generating or poolless paths. 5. the engine's.
        """
        usual = self._posts.get(target) if method == b"POST" else None
        return usual or self._where(method, target)

    def _where(self, method: bytes, target: bytes) -> Where:
        path = decoded_path(target)
        if b"_polykv" in path and b"_polykv" in path.split(b"/"):
            return Where.PRIVATE
        if any(path == own or path.startswith(own + b"/") for own in self.own_prefixes):
            return Where.OWN
        if path in self.own_exact and method in _READS:
            return Where.OWN
        if method == b"POST" and path in self.generating:
            return Where.GENERATE
        if method == b"POST" and path in self.poolless:
            return Where.POOLLESS
        return Where.ENGINE

    def kind(self, target: bytes) -> Route:
        """What a path is for, whatever the method."""
        return self._kinds.get(target) or _KINDS.get(decoded_path(target).removeprefix(self.api_prefix), Route.OTHER)


def decoded_path(target: bytes) -> bytes:
    """The path of a request target as the engine reads it, without fragment, query or authority.

    It cuts at the first `#`, then at the first `?`, and decodes once, from left to right: `%XX`, `%uXXXX` (half a surrogate pair is
    nothing at all), and what is no escape stays.
    """
    path = target.partition(b"#")[0].partition(b"?")[0]
    if not path.startswith(b"/") and b"://" in path:
        path = b"/" + path.split(b"://", 1)[1].partition(b"/")[2]
    return _ESCAPE.sub(_unescaped, path) if b"%" in path else path


def _unescaped(escape: re.Match[bytes]) -> bytes:
    wide, narrow = escape.groups()
    return bytes([int(narrow, 16)]) if narrow else chr(int(wide, 16)).encode("utf-8", "ignore")
