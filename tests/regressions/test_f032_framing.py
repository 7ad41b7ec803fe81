"""F032: bodies cross unchanged, under exactly one framing, and fields of one connection stay on that connection."""

from __future__ import annotations

import gzip

import pytest

from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import Client, RelayRig, Reply, request
from tests.fakes.stub_engine import END, Do, Script, Seen, Stub, chunk, reply

ODD = b'{ "a" :\t1e2,\r\n"b":"\\u00e9\\/", "a":2 }'
ZIPPED = gzip.compress(ODD, mtime=0)

CASES: dict[bytes, Script] = {
    b"/gzip": reply(ZIPPED, extra=b"Content-Encoding: gzip\r\n"),
    b"/chunked": [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
        chunk(ODD[:7]),
        chunk(ODD[7:]),
        END,
    ],
    b"/odd": reply(ODD),
    b"/named": reply(ODD, extra=b"Connection: keep-alive, X-Hop\r\nX-Hop: secret\r\nKeep-Alive: timeout=5\r\nX-Stays: yes\r\n"),
    b"/204": [b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n"],
    b"/304": [b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\nContent-Length: 9\r\n\r\n'],
    b"/close": [b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n", ODD],
    b"/empty": reply(b""),
    b"/teapot": reply(b"<p>", status=b"418 I'm a teapot", kind=b"text/html"),
}


def _script(seen: Seen) -> Script:
    path = seen.target
    steps = CASES[path]
    if seen.method == b"HEAD":
        return [steps[0][: steps[0].index(b"\r\n\r\n") + 4]]  # type: ignore[index]
    return [*steps, Do.CLOSE] if path == b"/close" else steps


def _ask(port: int, path: bytes, accept: bytes, method: bytes = b"GET") -> tuple[Reply, Reply]:
    with Client(port) as client:
        client.send(request(method, path, extra=accept))
        first = client.reply(head_only=method == b"HEAD")
        if b"connection: close" in first.head.lower():
            return first, first
        client.send(request(method, b"/odd", extra=accept))
        return first, client.reply(head_only=method == b"HEAD")


@pytest.mark.parametrize("accept", [b"", b"Accept-Encoding: identity\r\n", b"Accept-Encoding: gzip\r\n"])
@pytest.mark.parametrize("path", list(CASES))
def test_the_reply_equals_the_direct_one(path: bytes, accept: bytes) -> None:
    """Status, reason, fields and body through the relay are those of the engine, and the connection stays in step."""
    with Stub(_script) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        direct, _ = _ask(stub.port, path, accept)
        through, following = _ask(rig.port, path, accept)
        assert through.complete
        assert through.body == direct.body
        assert through.head.split(b"\r\n")[0] == direct.head.split(b"\r\n")[0]
        assert len(through.header(b"content-length")) + len(through.header(b"transfer-encoding")) <= 1
        assert through.header(b"content-encoding") == direct.header(b"content-encoding")
        assert following.body in (ODD, through.body)
        assert stub.requests[-1].header(b"accept-encoding") == ([accept.split(b": ")[1].strip()] if accept else [])


def test_fields_named_by_connection_are_gone_and_others_stay() -> None:
    """A field that Connection names is dropped in both directions; its neighbours keep name, value and order."""
    with Stub(_script) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        got = rig.send(request(b"GET", b"/named", extra=b"Connection: X-Mine, keep-alive\r\nX-Mine: 1\r\nX-Kept: 2\r\n"))
        assert b"x-hop" not in got.head.lower()
        assert b"keep-alive" not in got.head.lower()
        assert got.header(b"x-stays") == [b"yes"]
        assert stub.requests[0].header(b"x-mine") == []
        assert stub.requests[0].header(b"connection") == []
        assert stub.requests[0].header(b"x-kept") == [b"2"]


@pytest.mark.parametrize("path", [p for p in CASES if p != b"/close"])
def test_head_has_fields_and_no_body(path: bytes) -> None:
    """HEAD answers with the engine's fields, without a body, and the connection can be used again."""
    with Stub(_script) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        first, second = _ask(rig.port, path, b"", b"HEAD")
        assert first.head.split(b"\r\n")[0].split(b" ", 1)[1] == CASES[path][0].split(b"\r\n")[0].split(b" ", 1)[1]  # type: ignore[union-attr]
        assert second.status == 200
