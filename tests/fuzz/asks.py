"""Requests as values: what is asked, and how it is put on the wire."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from tests.lengths import length

Header = tuple[bytes, bytes]


class Framed(Enum):
    """How a body is delimited."""

    NONE = "none"
    LENGTH = "length"
    CHUNKED = "chunked"


_MOST_CHUNKS = 2000


@dataclass(frozen=True)
class Ask:
    """A request. `chunks` are the sizes of its chunks, over and over; `cuts` where its bytes are cut into writes, likewise."""

    method: bytes = b"GET"
    target: bytes = b"/health"
    headers: Sequence[Header] = ()
    body: bytes = b""
    framed: Framed = Framed.NONE
    chunks: Sequence[int] = (1 << 20,)
    cuts: Sequence[int] = ()
    version: bytes = b"1.1"
    connection: bytes | None = None
    expects: bool = False

    def __repr__(self) -> str:
        shown = self.body if len(self.body) < 600 else self.body[:300] + b"...%d bytes" % len(self.body)
        rest = {key: value for key, value in self.__dict__.items() if key not in {"body", "method", "target"}}
        return f"Ask({self.method!r} {self.target!r}, {shown!r}, {rest})"

    @property
    def wants_end(self) -> bool:
        """Does its connection end with it? In HTTP/1.0 always, since we keep none of those."""
        return self.version == b"1.0" or (self.connection or b"").lower() == b"close"

    @property
    def head(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.method, self.target, self.version), b"Host: t"]
        lines += [b"%b: %b" % one for one in self.headers]
        if self.connection is not None:
            lines.append(b"Connection: " + self.connection)
        if self.expects:
            lines.append(b"Expect: 100-continue")
        if self.framed is Framed.LENGTH:
            lines.append(b"Content-Length: %d" % len(self.body))
        elif self.framed is Framed.CHUNKED:
            lines.append(b"Transfer-Encoding: chunked")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    @property
    def wire_body(self) -> bytes:
        """The body in its framing; the last chunk takes what is left of a large one."""
        if self.framed is Framed.NONE:
            return b""
        if self.framed is Framed.LENGTH:
            return self.body
        parts, at, n = [], 0, 0
        while at < len(self.body):
            size = self.chunks[n % len(self.chunks)] if n < _MOST_CHUNKS else len(self.body)
            piece = self.body[at : at + size]
            parts.append(b"%x\r\n%b\r\n" % (len(piece), piece))
            at, n = at + size, n + 1
        return b"".join([*parts, b"0\r\n\r\n"])

    @property
    def whole(self) -> bytes:
        """Head and body."""
        return self.head + self.wire_body

    def pieces(self, data: bytes) -> list[bytes]:
        """`data` cut into writes; at most forty, so that a large body does not become a million of them."""
        if not self.cuts:
            return [data]
        made, at = [], 0
        for n in range(40):
            size = self.cuts[n % len(self.cuts)]
            if at + size >= len(data):
                break
            made.append(data[at : at + size])
            at += size
        return [*made, data[at:]]


NAMES = st.from_regex(rb"\A[A-Za-z][A-Za-z0-9!#$%&'*+.^_`|~-]{0,30}\Z")
VALUES = st.binary(max_size=60).map(lambda raw: bytes(b for b in raw if b >= 0x20 and b != 0x7F).strip())
_TAKEN = {b"host", b"connection", b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"te", b"trailer", b"keep-alive"}
_TAKEN |= {b"proxy-connection", b"content-type", b"accept-encoding", b"range", b"content-encoding", b"http2-settings"}


def free(header: Header) -> bool:
    """A field that means nothing to HTTP itself, nor to us."""
    lower = header[0].lower()
    return lower not in _TAKEN and not lower.startswith((b"x-polykv-", b"x-pool-", b"x-session-", b"x-shared-"))


HEADERS = st.lists(st.tuples(NAMES, VALUES).filter(free), max_size=6)
SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=5)
CUTS = st.one_of(st.just([]), st.lists(st.integers(1, 200), min_size=1, max_size=6))
SEGMENTS = st.text("abcXYZ019-._~!$&'()*+,;=:@%äñ€😀 ", max_size=12)


@st.composite
def targets(draw: st.DrawFn) -> bytes:
    """Paths and queries, escaped or with raw bytes above ASCII; none of ours."""
    parts = draw(st.lists(SEGMENTS, max_size=4))
    path = "/" + "/".join(quote(part, safe=draw(st.sampled_from(["", "!$&'()*+,;=:@"]))) for part in parts)
    query = draw(st.sampled_from(["", "?", "?a=b&a=c", "?x=%00%ff", "?q=a+b%20c#"])).rstrip("#")
    target = (path + query).encode()
    own = (b"/polykv", b"/gpu", b"/metrics", b"/_polykv")
    return b"/x" + target if target.startswith(own) or b"_polykv" in target else target


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ODD = [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-0",
    b"1" * 400,
    b'"\\ud800"',
    b'"\\u0000"',
    b"[" * 200 + b"]" * 200,
    b"{}",
    b"null",
    b'""',
]


@st.composite
def spoiled(draw: st.DrawFn, whole: bytes) -> bytes:
    """JSON text as it is, or cut off, or with a value, a key twice, or bytes put in."""
    kind = draw(st.sampled_from(["whole", "whole", "cut", "value", "twice", "bytes", "space", "bom"]))
    at = draw(st.integers(0, len(whole)))
    if kind == "cut":
        return whole[:at]
    if kind == "value":
        return whole.rstrip(b"}") + b',"zz":' + draw(st.sampled_from(ODD)) + b"}"
    if kind == "twice":
        return b'{"stream":7,' + whole[1:]
    if kind == "bytes":
        return whole[:at] + draw(st.binary(min_size=1, max_size=5)) + whole[at:]
    if kind == "space":
        return whole.replace(b",", b" ,\r\n\t")
    return (b"\xef\xbb\xbf" if kind == "bom" else b"") + whole


def encoded(value: Any) -> bytes:
    """JSON text; NaN and the like are written as Python does."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


LARGE = length(200_000, 2_000_000)
"""Bytes of the largest bodies."""


def bodies() -> st.SearchStrategy[bytes]:
    """Small random bytes, JSON, and now and then many bytes of one kind."""
    large = st.builds(
        lambda size, unit: (unit * (size // len(unit) + 1))[:size], st.integers(0, LARGE), st.binary(min_size=1, max_size=9)
    )
    return st.binary(max_size=300) | JSON.map(encoded) | large


@st.composite
def asks(
    draw: st.DrawFn,
    target: st.SearchStrategy[bytes],
    body: st.SearchStrategy[bytes],
    methods: Sequence[bytes],
    headers: st.SearchStrategy[list[Header]] = HEADERS,
) -> Ask:
    """Well-formed requests."""
    method = draw(st.sampled_from(methods))
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]))
    framings = [Framed.LENGTH, Framed.CHUNKED] if version == b"1.1" else [Framed.LENGTH]
    if method in {b"GET", b"HEAD", b"OPTIONS"}:
        framings.append(Framed.NONE)
    framed = draw(st.sampled_from(framings))
    sent = b"" if framed is Framed.NONE else draw(body)
    kinds = st.sampled_from([b"application/json", b"text/plain", b"application/octet-stream", b"application/json; charset=utf-8"])
    kind = [(b"Content-Type", draw(kinds))] if sent and draw(st.booleans()) else []
    return Ask(
        method=method,
        target=draw(target),
        headers=[*kind, *draw(headers)],
        body=sent,
        framed=framed,
        chunks=draw(SIZES),
        cuts=draw(CUTS),
        version=version,
        connection=draw(st.sampled_from([None, None, b"close", b"keep-alive", b"Keep-Alive"])),
        expects=version == b"1.1" and framed is not Framed.NONE and draw(st.sampled_from([False, False, True])),
    )
