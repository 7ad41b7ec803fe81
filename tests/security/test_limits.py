"""Nobody takes more than his part: connections, time, heads and bodies are bounded, and who meets a bound is told which."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from polykv_proxy import open_files
from polykv_proxy.api.relay import RelayLimits
from polykv_proxy.core.tally import Unwelcome
from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import Do, Stub, reply

POST = b"POST /completion HTTP/1.1\r\nHost: t\r\n"
SLOW = RelayLimits(stall_s=0.3)


@contextmanager
def relay_before(stub: Stub, limits: RelayLimits) -> Iterator[RelayRig]:
    """A relay in front of this engine."""
    with stub, RelayRig(EngineAddress(port=stub.port), limits=limits) as rig:
        yield rig


def test_one_connection_too_many_is_a_503_and_the_others_go_on() -> None:
    """Who comes when all places are taken is told so at once; a place that is left is free again."""
    with relay_before(Stub(lambda _: reply()), RelayLimits(connections=2)) as rig, rig.connect() as first:
        second = rig.connect()
        for client in (first, second):
            client.send(request())
            assert client.reply().status == 200
        with rig.connect() as third:
            got = third.reply()
            assert (got.status, got.header(b"retry-after"), got.header(b"connection")) == (503, [b"1"], [b"close"])
            assert b"too_many_connections" in got.body
            assert third.rest() == b""
        first.send(request())
        assert first.reply().status == 200
        second.sock.close()
        _until_taken(rig)


def _until_taken(rig: RelayRig) -> None:
    """Until a new connection is served; the loop learns of the closed one in its own time."""
    for _ in range(200):
        with rig.connect() as client:
            client.send(request())
            if client.reply().status == 200:
                return
    raise AssertionError("no place was given back")


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /x HTT",
        b"GET /x HTTP/1.1\r\nHost: t\r\nX-A: ",
        POST + b"Content-Length: 10\r\n\r\n{",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"POST /polykv/ping HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 10\r\n\r\n{",
    ],
    ids=["line", "field", "length", "chunk", "ours", "generating"],
)
def test_a_request_that_never_ends_is_a_408(begun: bytes) -> None:
    """A head or a body that stops coming holds a connection for a bounded time; what was answered before stays answered."""
    with relay_before(Stub(lambda _: reply()), SLOW) as rig, rig.connect() as client:
        client.send(request())
        assert client.reply().status == 200
        client.send(begun)
        if begun.startswith(b"POST /polykv/ping"):  # answers without a look at the body
            assert client.reply().status == 200
        got = client.reply()
        assert (got.status, got.header(b"connection")) == (408, [b"close"])
        assert b"request_timeout" in got.body
        assert client.rest() == b""


def test_who_is_sent_away_is_counted() -> None:
    """By the code that each was told, and connections as they come and go."""
    limits = RelayLimits(stall_s=0.3, connections=1, head=1000)
    with relay_before(Stub(lambda _: reply()), limits) as rig:
        for data in (
            b"GET /x HTTP/9.9\r\n\r\n",
            POST + b"X-A: " + b"a" * 2000 + b"\r\n\r\n",
            POST + b"Transfer-Encoding: gzip\r\n\r\n",
            b"GET",
        ):
            with rig.connect() as client:
                client.send(data)
                assert 400 <= client.reply().status < 500
                assert client.rest() == b""
        with rig.connect() as client:
            client.send(request())
            assert client.reply().status == 200
            with rig.connect() as other:
                assert other.reply().status == 503
            tally = rig.on_loop(lambda: dict(rig.relay.tally.unwelcome))
    assert tally == {Unwelcome.MALFORMED: 2, Unwelcome.LARGE: 1, Unwelcome.SLOW: 1, Unwelcome.MANY: 1}
    assert rig.relay.tally.n_opened == rig.relay.tally.n_closed == 6


def test_a_head_has_one_deadline_however_it_drips() -> None:
    """A byte now and then does not prolong it."""
    with relay_before(Stub(lambda _: reply()), SLOW) as rig, rig.connect() as client:
        client.sock.settimeout(0.05)
        client.send(b"GET /x HTTP/1.1\r\nX-A: ")
        got = b""
        while not got:
            client.send(b"a")
            try:
                got = client.sock.recv(65536)
            except TimeoutError:
                continue
        assert got.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_comes_slowly_is_waited_for() -> None:
    """Each piece gives it time anew."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port), limits=RelayLimits(stall_s=1.0)) as rig:
        with rig.connect() as client:
            client.send(POST + b"Content-Length: 30\r\n\r\n")
            client.sock.settimeout(0.05)
            for _ in range(30):  # a second and a half in all
                with pytest.raises(TimeoutError):
                    client.more()
                client.send(b"x")
            client.sock.settimeout(30)
            assert client.reply().status == 200
        assert stub.requests[0].body == b"x" * 30


def test_a_client_that_waits_for_us_is_not_slow() -> None:
    """While the engine takes no more of a body, it is not the client that is late."""
    with relay_before(Stub(lambda _: [Do.STALL], read_body=False), SLOW) as rig, rig.connect() as client:
        client.send(POST + b"Content-Length: 100000000\r\n\r\n")
        client.sock.settimeout(1.0)
        with pytest.raises(TimeoutError):  # when everything on the way is full
            client.sock.sendall(b"x" * 50_000_000)
        with pytest.raises(TimeoutError):
            client.more()


def test_an_idle_connection_is_not_a_slow_one() -> None:
    """Between requests the keep-alive time counts, not the patience for a request."""
    with relay_before(Stub(lambda _: reply()), SLOW) as rig, rig.connect() as client:
        for data in (request(), request(b"POST", b"/polykv/ping", b"{}")):
            client.send(data[:-1])
            client.send(data[-1:])
            assert client.reply().status == 200
        client.sock.settimeout(0.8)
        with pytest.raises(TimeoutError):
            client.more()
        client.send(request())
        client.sock.settimeout(30)
        assert client.reply().status == 200


def test_open_files_bound_the_connections(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Two files a connection, and some for ourselves: where the system gives fewer, fewer connections are taken."""
    limits = [(1000, 3000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _what, wanted: limits.append(wanted))
    assert open_files.room_for(500) == 500
    assert limits[-1] == (1256, 3000)
    assert not caplog.records
    assert open_files.room_for(4096) == (3000 - 256) // 2
    assert "ulimit -n" in caplog.text
