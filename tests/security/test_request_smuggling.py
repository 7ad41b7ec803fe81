"""What two parsers could read in two ways is answered once, by us, and the connection ends; the engine never sees two requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig
from tests.fakes.stub_engine import Stub, reply

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: t\r\n\r\n"
"""A request that must never be seen."""
FIELDS = {
    "length and chunked": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
    "chunked and length": b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n",
    "one length twice": b"Content-Length: 5\r\nContent-Length: 5\r\n",
    "a list of lengths": b"Content-Length: 5, 5\r\n",
    "a length with a plus": b"Content-Length: +5\r\n",
    "a length with a minus": b"Content-Length: -5\r\n",
    "a hexadecimal length": b"Content-Length: 0x5\r\n",
    "a length with an underscore": b"Content-Length: 1_0\r\n",
    "a length with a gap": b"Content-Length: 5 0\r\n",
    "a length of no digits": b"Content-Length: \r\n",
    "a length in other digits": "Content-Length: \u0665\r\n".encode(),
    "a length beyond 64 bits": b"Content-Length: 18446744073709551621\r\n",
    "a gap before the colon": b"Content-Length : 5\r\n",
    "a gap before the other colon": b"Transfer-Encoding : chunked\r\n",
    "a vertical tab": b"Transfer-Encoding:\x0bchunked\r\n",
    "a quoted coding": b'Transfer-Encoding: "chunked"\r\n',
    "an unknown coding": b"Transfer-Encoding: xchunked\r\n",
    "a coding before chunked": b"Transfer-Encoding: gzip, chunked\r\n",
    "chunked twice": b"Transfer-Encoding: chunked, chunked\r\n",
    "chunked in two fields": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    "a parameter": b"Transfer-Encoding: chunked;q=1\r\n",
    "identity": b"Transfer-Encoding: identity\r\n",
    "a folded field": b"X-A: 1\r\n Content-Length: 5\r\n",
    "a folded coding": b"Transfer-Encoding:\r\n chunked\r\n",
    "a fold by tab": b"X-A: 1\r\n\tContent-Length: 5\r\n",
    "a bare line feed": b"X-A: 1\nContent-Length: 5\r\n",
    "a bare carriage return": b"X-A: 1\rContent-Length: 5\r\n",
    "a NUL in a value": b"X-A: 1\x002\r\n",
    "a NUL in a name": b"X\x00A: 1\r\n",
    "an escape in a value": b"X-A: \x1b[2J\r\n",
    "a field without a name": b": 1\r\n",
    "a field without a colon": b"Content-Length\r\n",
}
CHUNKS = {
    "a size with a plus": b"+2\r\n{}\r\n0\r\n\r\n",
    "a size with a minus": b"-2\r\n{}\r\n0\r\n\r\n",
    "a size with 0x": b"0x2\r\n{}\r\n0\r\n\r\n",
    "a gap before a size": b" 2\r\n{}\r\n0\r\n\r\n",
    "a gap behind a size": b"2 \r\n{}\r\n0\r\n\r\n",
    "a size with an underscore": b"1_0\r\n{}\r\n0\r\n\r\n",
    "a size beyond 64 bits": b"10000000000000002\r\n{}\r\n0\r\n\r\n",
    "a size before a line feed": b"2\n{}\r\n0\r\n\r\n",
    "no line end behind a chunk": b"2\r\n{}xx0\r\n\r\n",
    "a line feed behind a chunk": b"2\r\n{}\n0\r\n\r\n",
    "a line feed in an extension": b"2;a\nb\r\n{}\r\n0\r\n\r\n",
    "a carriage return in an extension": b"2;a\rb\r\n{}\r\n0\r\n\r\n",
    "line feeds at the end": b"2\r\n{}\r\n0\n\n",
    "a length in the trailer": b"2\r\n{}\r\n0\r\nContent-Length: 35\r\n\r\n",
}
LINES = {
    "a NUL in the target": b"GET /x\x00y HTTP/1.1\r\nHost: t\r\n\r\n",
    "a control in the target": b"GET /x\x01y HTTP/1.1\r\nHost: t\r\n\r\n",
    "a tab in the target": b"GET /x\ty HTTP/1.1\r\nHost: t\r\n\r\n",
    "a second version": b"GET /x HTTP/1.1 y HTTP/1.1\r\nHost: t\r\n\r\n",
    "line feeds alone": b"GET /x HTTP/1.1\nHost: t\n\n",
    "a space before the first field": b"GET /x HTTP/1.1\r\n Host: t\r\n\r\n",
    "no version": b"GET /x\r\n\r\n",
    "version 1.2": b"GET /x HTTP/1.2\r\nHost: t\r\n\r\n",
    "version 2.0": b"GET /x HTTP/2.0\r\nHost: t\r\n\r\n",
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a TLS hello": bytes.fromhex("16030100f1010000ed0303") + b"x" * 80,
    "an unknown method": b"FOO /x HTTP/1.1\r\nHost: t\r\n\r\n",
    "a method in small letters": b"get /x HTTP/1.1\r\nHost: t\r\n\r\n",
}


def _head(target: bytes, fields: bytes) -> bytes:
    return b"POST " + target + b" HTTP/1.1\r\nHost: t\r\n" + fields + b"\r\n"


@dataclass
class Door:
    """A relay before an engine that nothing may reach."""

    stub: Stub
    rig: RelayRig

    def refuses(self, data: bytes, status: int = 400) -> None:
        """One answer, the end of the connection, and nothing for the engine."""
        with self.rig.connect() as client:
            client.send(data)
            got = client.reply()
            assert (got.status, got.header(b"connection")) == (status, [b"close"])
            assert client.rest() == b""
        assert self.stub.requests == []


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        yield Door(stub, rig)


@pytest.mark.parametrize("target", [b"/v1/chat/completions", b"/polykv/ping"])
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_fields_that_can_be_read_in_two_ways(fields: bytes, target: bytes, door: Door) -> None:
    """400, for the engine's routes and for ours."""
    door.refuses(_head(target, fields) + b"0\r\n\r\n" + HIDDEN)


@pytest.mark.parametrize("body", CHUNKS.values(), ids=CHUNKS.keys())
def test_chunks_that_can_be_read_in_two_ways(body: bytes, door: Door) -> None:
    """400; the parts of the body that came before are not sent on as a whole one."""
    door.refuses(_head(b"/v1/chat/completions", b"Transfer-Encoding: chunked\r\n") + body + HIDDEN)


@pytest.mark.parametrize("data", LINES.values(), ids=LINES.keys())
def test_a_first_line_that_is_none(data: bytes, door: Door) -> None:
    """400; what follows is not looked at."""
    door.refuses(data + HIDDEN)


def test_a_first_line_without_end_is_a_431(door: Door) -> None:
    """It is not kept until the memory is full."""
    door.refuses(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: t\r\n\r\n" + HIDDEN, 431)


@pytest.mark.parametrize(
    "head",
    [b"GET /x HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n", b"GET /x HTTP/1.0\r\n\r\n"],
)
def test_nothing_follows_a_last_request(head: bytes) -> None:
    """What a client sends behind a request after which it said it would close is dropped."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        client.send(head + HIDDEN)
        assert client.reply().status == 200
        assert client.rest() == b""
        assert [seen.target for seen in stub.requests] == [b"/x"]


def test_nothing_follows_a_refused_tunnel(door: Door) -> None:
    """What comes behind CONNECT was meant for somebody else."""
    door.refuses(b"CONNECT t:80 HTTP/1.1\r\nHost: t\r\n\r\n" + HIDDEN, 405)


def test_a_body_that_looks_like_a_request_is_a_body() -> None:
    """Also behind an offer of another protocol, and behind a method that mostly has none."""
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        for extra in (b"", offer):
            client.send(b"GET /x HTTP/1.1\r\nHost: t\r\n%bContent-Length: %d\r\n\r\n%b" % (extra, len(HIDDEN), HIDDEN))
            assert client.reply().status == 200
        assert [(seen.target, seen.body) for seen in stub.requests] == [(b"/x", HIDDEN)] * 2


def test_names_in_connection_take_no_framing_away() -> None:
    """A client that declares Content-Length and Host to be of this connection only gets both through, made anew."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        assert rig.send(_head(b"/x", b"Connection: content-length, host\r\nContent-Length: 2\r\n") + b"{}").status == 200
        assert stub.requests[0].body == b"{}"
        assert stub.requests[0].header(b"content-length") == [b"2"]


def test_line_breaks_in_escapes_stay_escapes() -> None:
    """A target with %0d%0a in it crosses as it came: no field of ours can be made of it."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        assert rig.send(b"GET /x%0d%0aX-Polykv-Key:%20k HTTP/1.1\r\nHost: t\r\n\r\n").status == 200
        assert stub.requests[0].target == b"/x%0d%0aX-Polykv-Key:%20k"
        assert stub.requests[0].header(b"x-polykv-key") == []
