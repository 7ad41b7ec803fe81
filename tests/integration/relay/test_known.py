"""Heads that were read before: what goes without a parser is what it would be with it."""

from __future__ import annotations

import pytest

from polykv_proxy.api.relay import RelayLimits, RelayProtocol
from polykv_proxy.api.relay.upstream import Upstream
from polykv_proxy.errors import ApiError
from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import Do, Stub, reply
from tests.integration.relay.test_gate import Gate


def test_a_head_that_was_read_before_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second such request and reply, of other lengths, on whatever connections, go without a parser; all else with it."""
    read: list[str] = []
    for one in (RelayProtocol, Upstream):
        was = one.on_headers_complete
        monkeypatch.setattr(one, "on_headers_complete", lambda self, was=was: (read.append(type(self).__name__), was(self))[1])
    with Stub(lambda seen: reply(seen.body)) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        for n in (1, 10, 100):
            body = b"x" * n
            assert rig.send(request(b"POST", b"/v1/models", body)).body == body
            assert stub.requests[-1].body == body
        assert read == ["RelayProtocol", "Upstream"]
        with rig.connect() as client:
            for piece in (request(b"POST", b"/v1/models", b"yz")[:-1], b"z"):
                client.send(piece)
                rig.turn()
            assert client.reply().body == b"yz", "not whole in one read"
            client.send(request(b"POST", b"/v1/models", b"1") + request(b"POST", b"/v1/models", b"22"))
            assert [client.reply().body for _ in range(2)] == [b"1", b"22"], "two in one read"
            client.send(b"\r")
            rig.turn()
            client.send(b"\n" + request(b"POST", b"/v1/models", b"3"))
            assert client.reply().body == b"3", "behind an empty line"
            client.send(request(b"POST", b"/v1/models", b"4"))
            assert client.reply().body == b"4"
        assert read.count("RelayProtocol") == 5


def test_a_reply_longer_than_it_says_is_cut_there() -> None:
    """Whether its head was read before or not; and its connection is not used again."""
    script = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"]
    with Stub(lambda _: script) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        for _ in range(4):
            client.send(request(b"POST", b"/x", b"{}"))
            assert client.reply().body == b"ok"
        assert rig.pool.n_idle == 0


def test_a_reply_shorter_than_it_says_is_an_end() -> None:
    """Of the connection to the client, whose body is not whole: also when the head was read before."""
    scripts = [reply(b"12"), [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n1", Do.CLOSE]]
    with Stub(lambda _: scripts[0]) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        assert rig.send(request(b"POST", b"/x", b"{}")).body == b"12"
        del scripts[0]
        got = rig.send(request(b"POST", b"/x", b"{}"))
        assert (got.body, got.complete) == (b"1", False)


@pytest.mark.parametrize("target", [b"/x", b"/polykv/nothing"])
def test_a_body_that_looks_like_a_known_request_is_a_body(target: bytes) -> None:
    """A request that was answered before its body had come: what comes is still that body, however much it looks like a request."""
    inner = request(b"POST", b"/x", b"{}")
    shut = ApiError("draining", "not now")
    with Stub(lambda seen: reply(seen.target)) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        for _ in range(2):
            client.send(inner)
            assert client.reply().body == b"/x"
        rig.on_loop(lambda: setattr(rig.pool, "refusal", shut))
        client.send(request(b"POST", target, inner)[: -len(inner)])
        assert client.reply().status in (503, 404)
        rig.on_loop(lambda: setattr(rig.pool, "refusal", None))
        client.send(inner)
        rig.turn()
        assert len(stub.requests) == 2


def test_a_known_request_whose_body_is_too_large() -> None:
    """Is told so, as the first of its kind would be."""
    limits = RelayLimits(scanned_body=100)
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port), limits=limits, gate=Gate()) as rig:
        assert [rig.send(request(b"POST", b"/completion", b"x" * n)).status for n in (10, 10, 101)] == [200, 200, 413]
        assert len(stub.requests) == 2


def test_the_gate_is_told_of_a_known_request_what_it_is_told_of_the_first() -> None:
    """Its fields with its own length, their names, and its own body."""
    gate = Gate()
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig:
        for body in (b"{}", b"{}", b'{"n": 1}'):
            assert rig.send(request(b"POST", b"/completion", body, b"X-Pool-Id: 1\r\n")).status == 200
    first, again, other = gate.asked
    assert again == first
    assert other == first._replace(headers=[*first.headers[:-1], (b"Content-Length", b"8")], body=b'{"n": 1}')
    assert first.names == {b"host", b"x-pool-id", b"content-length"}


def test_a_known_request_that_asks_for_more_than_the_answer() -> None:
    """With an id to be returned, or in a version or on a connection that ends: each gets what is its own."""
    with Stub(lambda seen: reply(seen.body)) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        for _ in range(2):
            got = [rig.send(request(b"POST", b"/x", b"1", b"X-Request-Id: %d\r\n" % n)).header(b"x-request-id") for n in range(3)]
            assert got == [[b"0"], [b"1"], [b"2"]]
            assert rig.send(request(b"POST", b"/x", b"1", b"Connection: close\r\n")).header(b"connection") == [b"close"]
            assert rig.send(request(b"POST", b"/x", b"1")).header(b"connection") == []
            old = request(b"POST", b"/x", b"1").replace(b"HTTP/1.1", b"HTTP/1.0")
            assert rig.send(old).header(b"connection") == [b"close"]
