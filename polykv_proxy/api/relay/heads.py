"""HTTP/1.1 heads as bytes: what is kept, dropped and added when a message crosses the relay.

Law: pure. Hop-by-hop fields and framing belong to one connection and are made anew here; every other field keeps its name,
value and order. Fields named `x-polykv-*` never cross in either direction.
"""

from __future__ import annotations

import http
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polykv_proxy.core import request_ids
from polykv_proxy.ports import Header

_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"})
_REQUEST_DROP = _HOP | {b"content-length", b"expect"}
_REPLY_DROP_ALL = _HOP | {b"content-length"}
_OURS = b"x-polykv-"
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close", b"upgrade", b"te", b""})
_VERSIONS = ("1.1", "1.0")
_N_EXPECT, _N_ID = len(b"expect"), len(request_ids.FIELD)

CHUNKED = b"Transfer-Encoding: chunked\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BadHeadError(ValueError):
    """A head that must not be relayed; the text says why."""


@dataclass(frozen=True, slots=True)
class Framing:
    """How the body of one message is delimited: `chunked`, a `length`, or neither (none, or until the connection closes)."""

    length: int | None = None
    chunked: bool = False


def framing_of(headers: Iterable[Header], version: str = "1.1") -> Framing:
    """Framing named by the fields of a head that the parser has accepted."""
    if version not in _VERSIONS:
        raise BadHeadError("its version is neither 1.1 nor 1.0")
    length: int | None = None
    chunked = False
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-length":
            length = int(value)
        elif lower == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise BadHeadError("only the transfer encoding 'chunked' is understood")
            chunked = True
    if chunked and version == "1.0":
        raise BadHeadError("HTTP/1.0 has no chunked bodies")
    if chunked and length is not None:
        raise BadHeadError("Content-Length and Transfer-Encoding must not be sent together")
    return Framing(length, chunked)


def notes_of(headers: Iterable[Header]) -> tuple[bool, bytes | None]:
    """Whether the client waits for leave to send its body, and its id of the request: both in one look."""
    expects, request_id = False, None
    for name, value in headers:
        n = len(name)
        if n == _N_EXPECT and name.lower() == b"expect":
            expects = expects or value.lower() == b"100-continue"
        elif n == _N_ID and request_id is None and name.lower() == request_ids.FIELD:
            request_id = value
    return expects, request_id


def request_head(method: bytes, target: bytes, headers: Sequence[Header], framing: Framing, extra: Sequence[Header] = ()) -> bytes:
    """Head of a relayed request. A missing Host (HTTP/1.0) is supplied, since the engine is spoken to in HTTP/1.1."""
    parts = [method, b" ", target, b" HTTP/1.1\r\n"]
    lines, names = _kept(headers, _REQUEST_DROP)
    if b"host" not in names:
        parts.append(b"Host: localhost\r\n")
    parts += lines
    if framing.chunked:
        parts.append(CHUNKED)
    elif framing.length is not None:
        parts.append(b"Content-Length: %d\r\n" % framing.length)
    parts += _lines(extra)
    parts.append(b"\r\n")
    return b"".join(parts)


def reply_head(
    status: int,
    reason: bytes,
    headers: Sequence[Header],
    *,
    keep_length: bool,
    chunked: bool,
    close: bool,
    extra: Sequence[Header] = (),
) -> bytes:
    """Head of a relayed reply. At most one framing field: the engine's length (`keep_length`), `chunked`, or none."""
    parts = [b"HTTP/1.1 %d %s\r\n" % (status, reason)]
    lines, _names = _kept(headers, _HOP if keep_length else _REPLY_DROP_ALL)
    parts += lines
    if chunked:
        parts.append(CHUNKED)
    if close:
        parts.append(b"Connection: close\r\n")
    parts += _lines(extra)
    parts.append(b"\r\n")
    return b"".join(parts)


def answer(status: int, headers: Sequence[Header], body: bytes, *, head_only: bool, close: bool) -> bytes:
    """A whole answer of ours."""
    parts = [b"HTTP/1.1 %d %s\r\n" % (status, _reason(status))]
    parts += _lines(headers)
    parts.append(b"Content-Length: %d\r\n" % len(body))
    if close:
        parts.append(b"Connection: close\r\n")
    parts.append(b"\r\n")
    if not head_only:
        parts.append(body)
    return b"".join(parts)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; `data` is not empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def wants_upgrade(headers: Iterable[Header]) -> bytes | None:
    """The protocol named by an Upgrade field, lower-case; None without one."""
    for name, value in headers:
        if name.lower() == b"upgrade":
            return value.strip().lower()
    return None


def plain_head(method: bytes, target: bytes, version: bytes, headers: Sequence[Header]) -> bytes:
    """The head of a request again, without its offer of another protocol."""
    lines = []
    for name, value in headers:
        lower = name.lower()
        if lower == b"connection":
            tokens = [token.strip() for token in value.split(b",") if token.strip().lower() != b"upgrade"]
            lines.append(b"Connection: %b\r\n" % b", ".join(tokens))
        elif lower != b"upgrade":
            lines.append(b"%b: %b\r\n" % (name, value))
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version, b"".join(lines))


def _kept(headers: Sequence[Header], drop: frozenset[bytes]) -> tuple[list[bytes], set[bytes]]:
    kept: list[tuple[bytes, bytes]] = []
    named: set[bytes] = set()
    for name, value in headers:
        lower = name.lower()
        if lower in drop or lower.startswith(_OURS):
            if lower == b"connection":
                named.update(token.strip().lower() for token in value.split(b","))
            continue
        if b"\n" in value or b"\r" in value:
            raise BadHeadError(f"the field {name.decode('latin-1')!r} contains a line break")
        kept.append((lower, b"%b: %b\r\n" % (name, value)))
    named -= _PLAIN_CONNECTION
    if named:
        kept = [field for field in kept if field[0] not in named]
    return [line for _, line in kept], {lower for lower, _ in kept}


def _lines(headers: Iterable[Header]) -> list[bytes]:
    return [b"%b: %b\r\n" % (name, value) for name, value in headers]


def _reason(status: int) -> bytes:
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
