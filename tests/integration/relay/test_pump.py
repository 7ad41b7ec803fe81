"""The pump: order, back-pressure, limits, doors and draining."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from polykv_proxy.api.relay import RelayLimits, UpstreamPool
from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import Client, RelayRig, request
from tests.fakes.stub_engine import END, SSE_HEAD, Do, Stub, chunk, reply


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    """Engine routes, our own routes and refusals on one connection keep their order, over a unix socket too."""
    path = tmp_path / "e.sock"
    with Stub(lambda seen: reply(seen.target), path=path), RelayRig(EngineAddress(uds=str(path))) as rig, rig.connect() as client:
        targets = [b"/a", b"/polykv/ping", b"/_polykv/v1/state", b"/b", b"/c", b"/polykv/ping", b"/d"]
        client.send(b"".join(request(b"GET", target) for target in targets))
        got = [client.reply() for _ in targets]
        assert [one.status for one in got] == [200, 200, 404, 200, 200, 200, 200]
        assert [one.body for one in got if one.body.startswith(b"/")] == [b"/a", b"/b", b"/c", b"/d"]


def test_thousands_of_pipelined_refusals_do_not_nest() -> None:
    """A long row of requests is answered one by one while the door is shut."""
    with RelayRig(None) as rig, rig.connect() as client:
        n = 3000
        client.send(request() * n)
        assert all(client.reply().status == 503 for _ in range(n))


@pytest.mark.parametrize(
    "target",
    [
        b"/_polykv/v1/hello",
        b"/%5fpolykv/v1/hello",
        b"/_poly%6Bv/v1/state",
        b"/%u005fpolykv/v1/hello",
        b"http://x/_polykv/v1/hello",
        b"/p/_polykv/v1/seqs",
        b"/_pol%uD800ykv/v1/hello",
        b"/_polykv#/v1/hello",
    ],
)
def test_private_verbs_are_the_engine_s_404(target: bytes) -> None:
    """However it is written, a private path never reaches the engine."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        got = rig.send(request(b"GET", target))
        assert got.status == 404
        assert json.loads(got.body) == {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}
        assert stub.requests == []


def test_a_slow_client_slows_the_engine_down() -> None:
    """Bytes that a client does not take are not piled up in the proxy."""
    size = 64 << 20
    script = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, *[b"x" * (1 << 20)] * 64]
    with Stub(lambda _: script) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, Client(rig.port, rcvbuf=4096) as client:
        client.send(request())
        client.until(b"\r\n\r\n")
        assert not stub.requests[0].finished.wait(1.0)
        n_read = len(client.data)
        while n_read < size:
            data = client.sock.recv(1 << 20)
            assert data
            n_read += len(data)
        assert stub.requests[0].finished.wait(10)
        assert n_read == size


def test_a_large_upload_crosses_whole() -> None:
    """A body far beyond all buffers arrives byte for byte."""
    body = bytes(range(256)) * (1 << 14)
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        assert rig.send(request(b"POST", b"/v1/embeddings", body)).status == 200
        assert stub.requests[0].body == body


def test_events_arrive_as_they_are_sent() -> None:
    """An event reaches the client while the next one has not been made yet."""
    with (
        Stub(lambda _: [SSE_HEAD, chunk(b"data: 1\n\n"), Do.HANG]) as stub,
        RelayRig(EngineAddress(port=stub.port)) as rig,
        rig.connect() as client,
    ):
        client.send(request(b"POST", b"/v1/chat/completions", b"{}"))
        client.until(b"data: 1\n\n")


@pytest.mark.parametrize("cut_at", range(1, 12))
def test_bytes_split_anywhere_arrive_unchanged(cut_at: int) -> None:
    """An event written in two pieces, split inside a character or between CR and LF, is the same to the client."""
    event = "data: é😀\r\n\r\n".encode()
    with (
        Stub(lambda _: [SSE_HEAD, chunk(event[:cut_at]), 0.01, chunk(event[cut_at:]), chunk(event + event), END]) as stub,
        RelayRig(EngineAddress(port=stub.port)) as rig,
    ):
        assert rig.send(request(b"POST", b"/completion", b"{}")).body == event * 3


def test_a_shut_door_is_a_503_with_retry_after() -> None:
    """Before the engine is there, clients are told to come back."""
    with RelayRig(None) as rig:
        got = rig.send(request())
        assert got.status == 503
        assert got.header(b"retry-after") == [b"2"]
        assert json.loads(got.body)["error"]["code"] == "engine_starting"


def test_nobody_listening_is_a_503_and_the_next_boot_works_at_once(tmp_path: Path) -> None:
    """A vanished engine costs a 503, never a hang; after it is back the first request works."""
    path = tmp_path / "e.sock"
    with RelayRig(EngineAddress(uds=str(path))) as rig, rig.connect() as client:
        client.send(request())
        assert client.reply().status == 503
        with Stub(lambda _: reply(), path=path):
            client.send(request())
            assert client.reply().status == 200
        client.send(request(b"POST", b"/completion", b"{}"))
        assert client.reply().status == 503
        with Stub(lambda _: reply(), path=path):
            client.send(request(b"POST", b"/completion", b"{}"))
            assert client.reply().status == 200


def test_draining_refuses_new_work_and_cut_ends_the_old() -> None:
    """Running streams go on while draining; the cut gives them one error event, and silent requests a 503."""
    with (
        Stub(lambda seen: [SSE_HEAD, chunk(b"data: 1\n\n"), Do.HANG] if seen.method == b"POST" else [Do.HANG]) as stub,
        RelayRig(EngineAddress(port=stub.port)) as rig,
        rig.connect() as stream,
        rig.connect() as silent,
        rig.connect() as late,
    ):
        stream.send(request(b"POST", b"/v1/chat/completions", b"{}"))
        stream.until(b"data: 1\n\n\r\n")
        silent.send(request())
        stub.wait_requests(2)
        rig.on_loop(rig.relay.drain)
        late.send(request())
        refused = late.reply()
        assert refused.status == 503
        assert refused.header(b"connection") == [b"close"]
        rig.on_loop(lambda: rig.relay.cut("draining", "The proxy is shutting down."))
        assert b'"code":"draining"' in stream.until(b"0\r\n\r\n")
        assert silent.reply().status == 503
        assert all(seen.peer_closed.wait(10) for seen in stub.requests)


def test_a_limit_of_connections_makes_requests_wait_and_passes_them_on() -> None:
    """More requests than connections all succeed, on no more connections than allowed."""
    with (
        Stub(lambda _: [0.02, *reply()]) as stub,
        RelayRig(EngineAddress(port=stub.port), pool=lambda: UpstreamPool(max_open=2)) as rig,
    ):
        clients = [rig.connect() for _ in range(12)]
        for client in clients:
            client.send(request(b"POST", b"/completion", b"{}"))
        assert all(client.reply().status == 200 for client in clients)
        assert stub.n_connections == 2
        for client in clients:
            client.sock.close()


def test_an_early_answer_to_an_unfinished_upload_is_relayed() -> None:
    """An engine that refuses before it has read the body is heard, and that connection is not used again."""
    with (
        Stub(lambda _: reply(b"no", status=b"413 Too Large"), read_body=False) as stub,
        RelayRig(EngineAddress(port=stub.port)) as rig,
    ):
        with rig.connect() as client:
            client.send(b"POST /v1/embeddings HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\nabc")
            assert client.reply().status == 413
        assert rig.on_loop(lambda: rig.pool.n_idle) == 0


def test_a_client_that_only_connects_costs_nothing() -> None:
    """Connections without a request open nothing to the engine."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        for _ in range(20):
            socket.create_connection(("127.0.0.1", rig.port)).close()
        assert rig.send(request()).status == 200
        assert stub.n_connections == 1


@pytest.mark.parametrize("before", [b"", b"\r\n", request()])
def test_an_idle_connection_is_closed_after_its_time(before: bytes) -> None:
    """Also one on which nothing has come but line breaks, which begin no request."""
    limits = RelayLimits(keep_alive_s=0.2)
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port), limits=limits) as rig, rig.connect() as client:
        client.send(before)
        if before == request():
            assert client.reply().status == 200
        assert client.rest() == b""


def test_a_connection_with_a_request_on_it_is_not_idle() -> None:
    """However long the engine is silent; its time begins with the end of the reply."""
    limits = RelayLimits(keep_alive_s=0.2)
    script = [SSE_HEAD, chunk(b"data: 1\n\n"), 0.7, chunk(b"data: 2\n\n"), END]
    with Stub(lambda _: script) as stub, RelayRig(EngineAddress(port=stub.port), limits=limits) as rig, rig.connect() as client:
        client.send(request(b"POST", b"/v1/chat/completions", b"{}"))
        assert client.reply().complete
        client.send(request(b"POST", b"/v1/chat/completions", b"{}"))
        assert client.reply().complete
