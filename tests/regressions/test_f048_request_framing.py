"""F048: the engine gets one well-formed framing and the identical body, however the client framed it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from polykv_proxy.ports import EngineAddress, Header, Plan, Refusal, RelayRequest, StreamStart
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import END, SSE_HEAD, Stub, chunk, reply

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\n"


class Gate:
    """Reads every body, attaches none."""

    def __init__(self, *, yes: bool = False) -> None:
        self.seen: list[bytes] = []
        self.yes = yes

    def concerns(self, request: RelayRequest) -> bool:
        self.seen.append(request.body)
        return self.yes

    counts = False

    async def count(self) -> Plan:
        raise AssertionError

    def objection(self, headers: Sequence[Header]) -> Refusal | None:
        return None

    async def plan(self, request: RelayRequest, waiting: StreamStart) -> Plan:
        return Plan((), lambda _s, _h: (), lambda: None)


@pytest.mark.parametrize("gate", [None, False, True])
def test_a_chunked_body_arrives_whole_under_one_framing(gate: bool | None) -> None:
    """Chunks reach the engine as one body, with a length or chunked, never both, whether it was read for the gate or not."""
    body = b'{"a":"' + b"x" * 70000 + b'"}'
    data = POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(body[:5]) + chunk(body[5:]) + END
    made = None if gate is None else Gate(yes=gate)
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port), gate=made) as rig:
        assert rig.send(data).status == 200
        seen = stub.requests[0]
        assert seen.body == body
        assert len(seen.header(b"content-length")) + len(seen.header(b"transfer-encoding")) == 1


@pytest.mark.parametrize("around", [b"", b" \t"])
def test_expect_continue_is_answered_by_us_and_not_sent_on(around: bytes) -> None:
    """A client that waits for 100 Continue gets it, sends its body, and the engine sees a plain request."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        client.send(POST + b"Expect:%b100-continue%b\r\nContent-Length: 2\r\n\r\n" % (around, around))
        assert client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"{}")
        assert client.reply().status == 200
        assert stub.requests[0].body == b"{}"
        assert stub.requests[0].header(b"expect") == []


def test_a_length_of_zero_and_a_get_with_a_body() -> None:
    """Both cross as they came."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        assert rig.send(request(b"POST", b"/x", b"")).status == 200
        assert rig.send(request(b"GET", b"/x", b"hello")).status == 200
        assert stub.requests[0].header(b"content-length") == [b"0"]
        assert stub.requests[1].body == b"hello"


def test_an_old_client_gets_events_unchunked_and_a_close() -> None:
    """HTTP/1.0 without Host: events as they come, no chunk framing, ended by close."""
    events = [b"data: 1\n\n", b"data: 2\n\n"]
    with (
        Stub(lambda _: [SSE_HEAD, chunk(events[0]), 0.05, chunk(events[1]), END]) as stub,
        RelayRig(EngineAddress(port=stub.port)) as rig,
        rig.connect() as client,
    ):
        client.send(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        got = client.reply()
        assert got.body == b"".join(events)
        assert got.header(b"transfer-encoding") == []
        assert len(stub.requests[0].header(b"host")) == 1


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"Content-Length: 4\r\nContent-Length: 5\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Content-Length: nine\r\n",
        b"Bad Name: 1\r\n",
    ],
)
def test_ambiguous_framing_is_a_400_and_never_reaches_the_engine(head: bytes) -> None:
    """What two parsers could read in two ways is refused, and the connection is closed."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        client.send(POST + head + b"\r\n0\r\n\r\nGET /slots HTTP/1.1\r\nHost: t\r\n\r\n")
        assert client.reply().status == 400
        assert client.rest() == b""
        assert stub.requests == []
        assert rig.loop_errors == []


def test_a_spoiled_body_is_a_400_and_the_engine_sees_the_peer_leave() -> None:
    """A chunk that is no chunk ends the exchange on both sides."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n")
        assert client.reply().status == 400
        assert stub.requests == []


def test_an_endless_head_is_refused() -> None:
    """A head beyond the limit is a 431, however slowly it comes."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        client.send(b"GET / HTTP/1.1\r\n" + b"X-A: 1\r\n" * 9000)
        assert client.reply().status == 431
