"""Our own routes speak HTTP as carefully as the relay: methods, framing, broken bodies, clients that leave (F044, F048)."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import pytest

from polykv_proxy.api.context import Keys
from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import Client, RelayRig
from tests.fakes.stub_engine import Stub, reply
from tests.integration.rig import rig

PING = b"POST /polykv/ping HTTP/1.1\r\nHost: t\r\n"


@pytest.mark.parametrize(
    "rest",
    [
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_a_body_that_is_no_http_is_told_so(rest: bytes) -> None:
    """400 and the end of the connection, as on relayed routes; never a silent close."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy:
        got = proxy.send(PING + rest)
        assert (got.status, got.header(b"connection")) == (400, [b"close"])
        assert b"invalid_request" in got.body


def test_an_old_client_cannot_send_chunks() -> None:
    """HTTP/1.0 has no chunked bodies, here as elsewhere."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy:
        got = proxy.send(b"POST /polykv/ping HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        assert got.status == 400


def test_a_broken_body_is_answered_in_its_turn() -> None:
    """What came before on the connection is answered first, and nothing is written between."""
    with Stub(lambda _: [0.2, *reply()]) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy, proxy.connect() as client:
        client.send(b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n" + PING + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert [client.reply().status, client.reply().status] == [200, 400]


async def test_head_and_options_are_answered_sensibly(tmp_path: Path) -> None:
    """HEAD is GET without the body; OPTIONS names the methods and needs no key; 405 names them too."""
    async with rig(tmp_path, keys=Keys(api=frozenset({"k"}))) as proxy:
        head = await proxy.api.head("/polykv/pools", headers={"x-api-key": "k"})
        assert head.status_code == 200
        assert (await proxy.api.head("/polykv/health")).status_code == 200
        options = await proxy.api.options("/polykv/pools")
        assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, POST, OPTIONS")
        assert (await proxy.api.options("/polykv/nothing")).status_code == 404
        wrong = await proxy.api.put("/polykv/health")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD, OPTIONS")


async def test_a_slash_too_many_is_no_redirect(tmp_path: Path) -> None:
    """A redirect would be made of the client's own Host header, and lose the body on the way."""
    async with rig(tmp_path) as proxy:
        reply_ = await proxy.api.post("/polykv/pools/", json={"prompt": "x"}, headers={"host": "elsewhere.example"})
        assert (reply_.status_code, reply_.json()["error"]["code"]) == (404, "not_found")


async def test_a_client_that_leaves_in_its_body_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is raised and nothing is logged when a body never comes to its end."""
    async with rig(tmp_path) as proxy:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/polykv/pools",
            "raw_path": b"/polykv/pools",
            "query_string": b"",
            "headers": [(b"content-length", b"100")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("t", 80),
            "client": ("c", 1),
            "root_path": "",
        }
        parts = iter([{"type": "http.request", "body": b'{"tok', "more_body": True}])

        async def receive() -> dict[str, object]:
            return next(parts, {"type": "http.disconnect"})

        async def send(_message: object) -> None: ...

        with caplog.at_level(logging.WARNING):
            await proxy.app(scope, receive, send)  # type: ignore[arg-type]
        assert not caplog.records


@pytest.mark.parametrize("target", [b"/polykv/ping", b"/completion"])
@pytest.mark.parametrize(
    "rest",
    [b"0\r\nX-T: " + b"a" * 200_000, b"0\r\n" + b"X-T: a\r\n" * 30_000, b"2;" + b"a" * 200_000],
    ids=["value", "many", "extension"],
)
def test_what_is_around_a_body_is_bounded(target: bytes, rest: bytes) -> None:
    """Trailers and chunk extensions are kept by the parser until they end: unbounded, in as much memory as the client likes."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy, proxy.connect() as client:
        client.send(b"POST " + target + b" HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        client.send(rest)
        if target == b"/polykv/ping":  # answers without a look at the body
            assert client.reply().status == 200
        assert client.reply().status == 431


async def test_a_request_that_others_follow_hears_of_the_end_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client that leaves a row of requests stops the one that runs, and nothing is written to a closed connection."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy:
        with caplog.at_level(logging.WARNING):
            client = Client(proxy.port, rcvbuf=4096)
            client.sock.settimeout(0.5)
            with contextlib.suppress(TimeoutError):  # until its answers, which it does not read, hold up everything
                while True:
                    client.send(b"GET /polykv/ping HTTP/1.1\r\nHost: t\r\n\r\n" * 100)
            client.reset()
            assert proxy.send(b"GET /polykv/ping HTTP/1.1\r\nHost: t\r\n\r\n").status == 200
        assert not caplog.records


@pytest.mark.parametrize("target", [b"/polykv/ping", b"/x"])
def test_a_long_row_of_requests_is_no_long_head(target: bytes) -> None:
    """Many requests in one read, the last of them cut off, are many small heads: each is answered."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy, proxy.connect() as client:
        one = b"GET " + target + b" HTTP/1.1\r\nHost: t\r\n\r\n"
        client.send(one * 4000 + one[:20])
        client.send(one[20:])
        assert {client.reply().status for _ in range(4001)} == {200}


def test_a_large_head_in_one_piece_is_refused() -> None:
    """It may come in a single read, behind another request."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy, proxy.connect() as client:
        client.send(b"GET /x HTTP/1.1\r\nHost: t\r\n\r\nGET /x HTTP/1.1\r\nHost: t\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n")
        assert [client.reply().status, client.reply().status] == [200, 431]
        assert len(stub.requests) == 1


def test_a_head_below_the_bound_may_come_in_pieces() -> None:
    """Sixty thousand bytes in sixty reads are not counted twice."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy, proxy.connect() as client:
        client.send(b"GET /x HTTP/1.1\r\nHost: t\r\n")
        for _ in range(60):
            client.send(b"X-A: " + b"a" * 993 + b"\r\n")
            proxy.on_loop(lambda: None)
        client.send(b"\r\n")
        assert client.reply().status == 200
