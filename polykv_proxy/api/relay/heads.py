"""HTTP/1.1 heads as bytes: what is kept, dropped and added when a message crosses the relay.

Law: pure. Hop-by-hop fields and framing belong to one connection and are made anew here; every other field keeps its name,
value and order. Fields named `x-polykv-*` never cross in either direction.
"""

from __future__ import annotations

import http
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from polykv_proxy.core import request_ids
from polykv_proxy.ports import Header

_CROSSES, _DROPPED, _CONNECTION, _LENGTH, _ENCODING, _EXPECT = range(6)
_KINDS_OF = {
    b"connection": _CONNECTION,
    b"content-length": _LENGTH,
    b"transfer-encoding": _ENCODING,
    b"expect": _EXPECT,
    **dict.fromkeys((b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"), _DROPPED),
}
_OURS = b"x-polykv-"
_HOSTS = (b"Host: ", b"host: ")
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close", b"upgrade", b"te", b""})

_VERSIONS = ("1.1", "1.0")
_N_EXPECT, _N_ID = len(b"expect"), len(request_ids.FIELD)

_CHUNKED = b"Transfer-Encoding: chunked"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BadHeadError(ValueError):
    """A head that must not be relayed; the text says why."""


class Framing(NamedTuple):
    """How the body of one message is delimited: `chunked`, a `length`, or neither (none, or until the connection closes)."""

    length: int | None = None
    chunked: bool = False


NO_BODY = Framing()


class _Kinds(dict[bytes, int]):
    """What becomes of a field, by its name as it is spelled. Asked for every field, of which there are few names.

    Learnt within bounds: names of strangers are not kept for ever.
    """

    def __missing__(self, name: bytes) -> int:
        lower = name.lower()
        kind = _DROPPED if lower.startswith(_OURS) else _KINDS_OF.get(lower, _CROSSES)
        if len(name) <= 64 and len(self) < 1024:
            self[name] = kind
        return kind


_KINDS = _Kinds()


def framing_of(headers: Iterable[Header], version: str = "1.1") -> Framing:
    """Framing named by the fields of a head that the parser has accepted."""
    if version not in _VERSIONS:
        raise BadHeadError("its version is neither 1.1 nor 1.0")
    length: int | None = None
    chunked = False
    for name, value in headers:
        kind = _KINDS[name]
        if kind == _LENGTH:
            length = int(value)
        elif kind == _ENCODING:
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
    lines = _kept(headers)
    if not (lines and lines[0].startswith(_HOSTS)) and not any(line[:5].lower() == b"host:" for line in lines):
        lines.insert(0, b"Host: localhost")
    if framing.chunked:
        lines.append(_CHUNKED)
    elif framing.length is not None:
        lines.append(b"Content-Length: %d" % framing.length)
    return _head(method + b" " + target + b" HTTP/1.1", lines, extra)


def with_length(head: bytes, framing: Framing) -> bytes:
    """A head of `request_head` without a body, as if it had been made for a length or none."""
    if framing.length is None:
        return head
    return b"%bContent-Length: %d\r\n\r\n" % (head[:-2], framing.length)


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
    lines = _kept(headers, _EXPECT, _LENGTH) if keep_length else _kept(headers, _EXPECT)
    if chunked:
        lines.append(_CHUNKED)
    if close:
        lines.append(b"Connection: close")
    return _head(b"HTTP/1.1 %d %b" % (status, reason), lines, extra)


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


def has_line_break(headers: Iterable[Header]) -> bool:
    """Would a field be more than one line?"""
    return any(b"\n" in value or b"\r" in value for _, value in headers)


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


def _kept(headers: Iterable[Header], *also: int) -> list[bytes]:
    """Lines of the fields that cross, and of those kinds that cross here `also`."""
    lines, named = [], b""
    for name, value in headers:
        kind = _KINDS[name]
        if not kind or kind in also:
            lines.append(name + b": " + value)
        elif kind == _CONNECTION:
            named += value + b","
    if named:
        own = {token.strip().lower() for token in named.split(b",")} - _PLAIN_CONNECTION
        lines = [line for line in lines if line.partition(b":")[0].lower() not in own]
    return lines


def _head(first: bytes, lines: list[bytes], extra: Sequence[Header]) -> bytes:
    """A head of these lines. BadHeadError when it has more of them than that."""
    if extra:
        lines += [name + b": " + value for name, value in extra]
    head = b"\r\n".join([first, *lines, b"\r\n"])
    if not head.count(b"\n") == head.count(b"\r") == len(lines) + 2:
        raise BadHeadError("a field contains a line break")
    return head


def _lines(headers: Iterable[Header]) -> list[bytes]:
    return [b"%b: %b\r\n" % (name, value) for name, value in headers]


def _reason(status: int) -> bytes:
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
