"""An id that a client gives its request comes back with every reply, and nothing is added to the replies of those who give none."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from polykv_proxy.api.access_log import AccessLog
from polykv_proxy.api.relay import RelayLimits
from polykv_proxy.api.request_ids import RequestIds
from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import END, SSE_HEAD, Do, Script, Seen, Stub, chunk, reply
from tests.integration.rig import relayed, rig

ID = b"X-Request-ID: r-1/\xe9\r\n"
TRACE = b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\ntracestate: a=b\r\n"


def _returned(got: object) -> list[bytes]:
    return got.header(b"x-request-id")  # type: ignore[attr-defined,no-any-return]


def test_the_engine_gets_it_as_it_came_and_the_client_gets_it_back() -> None:
    """With whole replies and streams; trace fields cross untouched; without an id there is none."""
    scripts = iter([reply(), [SSE_HEAD, chunk(b"data: 1\n\n"), END], reply()])
    with Stub(lambda _: next(scripts)) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy:
        for _ in range(2):
            assert _returned(proxy.send(request(b"POST", b"/completion", b"{}", ID + TRACE))) == [b"r-1/\xe9"]
        assert _returned(proxy.send(request())) == []
        assert [seen.header(b"x-request-id") for seen in stub.requests] == [[b"r-1/\xe9"], [b"r-1/\xe9"], []]
        assert stub.requests[0].header(b"traceparent") == [TRACE.split(b"\r\n")[0].partition(b": ")[2]]
        assert stub.requests[0].header(b"tracestate") == [b"a=b"]


def test_answers_of_ours_carry_it() -> None:
    """A refusal, a page that is nobody's, an engine that is lost."""
    limits = RelayLimits(scanned_body=10)
    with Stub(lambda _: [Do.DROP]) as stub, RelayRig(EngineAddress(port=stub.port), limits=limits) as proxy:
        lost = proxy.send(request(b"POST", b"/completion", b"{}", ID))
        hidden = proxy.send(request(b"GET", b"/_polykv/v1/hello", None, ID))
    assert (lost.status, _returned(lost)) == (503, [b"r-1/\xe9"])
    assert (hidden.status, _returned(hidden)) == (404, [b"r-1/\xe9"])


def test_one_that_the_engine_returns_itself_is_not_doubled() -> None:
    """Its own word counts."""
    with Stub(lambda _: reply(extra=b"X-Request-Id: theirs\r\n")) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy:
        assert _returned(proxy.send(request(b"GET", b"/x", None, ID))) == [b"theirs"]


def test_a_relay_that_adds_nothing_adds_no_id() -> None:
    """`--off`."""
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy:
        proxy.on_loop(lambda: setattr(proxy.relay, "echoes", False))
        assert _returned(proxy.send(request(b"GET", b"/x", None, ID))) == []


async def test_events_and_logs_name_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The events of a request, and what is said while it is decided about."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        await proxy.pool(prompt="a b c d", name="p")
        news = proxy.runtime.hub.telemetry.news
        seq = news.seq
        headers = {"x-pool-id": "p", "x-request-id": "r-2"}
        got = await client.post("/completion", json={"prompt": "a b c d e"}, headers=headers)
        assert (got.status_code, got.headers["x-request-id"], got.headers["x-pool-id"]) == (200, "r-2", "1")
        await proxy.settle()
        events = [json.loads(event.text) for event in news.after(seq) or []]
        assert {event["request_id"] for event in events if event.get("req")} == {"r-2"}


async def test_our_own_routes_return_it_too(tmp_path: Path) -> None:
    """Errors as well."""
    async with rig(tmp_path) as proxy:
        sent: list[dict] = []

        async def send(message: dict) -> None:
            sent.append(message)

        async def receive() -> dict:
            return {"type": "http.request", "body": b"", "more_body": False}

        for path in ("/polykv/pools", "/polykv/nothing"):
            scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [(b"x-request-id", b"r-3")]}
            await RequestIds(proxy.app)(scope, receive, send)  # type: ignore[arg-type]
        heads = [message for message in sent if message["type"] == "http.response.start"]
        assert [(head["status"], head["headers"][-1]) for head in heads] == [
            (200, (b"x-request-id", b"r-3")),
            (404, (b"x-request-id", b"r-3")),
        ]


def test_the_access_log_has_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    """What was asked, how it ended, by whom; never the query or the body."""
    caplog.set_level(logging.INFO, "polykv.access")

    def script(seen: Seen) -> Script:
        return [Do.DROP] if seen.target == b"/lost" else reply(status=b"404 Not Found")

    with Stub(script) as stub, RelayRig(EngineAddress(port=stub.port)) as proxy:
        proxy.on_loop(lambda: proxy.relay.observers.append(AccessLog(lambda: 1.0)))
        proxy.send(request(b"POST", b"/a?secret=1", b'{"prompt":"secret"}', ID))
        proxy.send(request(b"POST", b"/lost", b"{}"))
    first, second = (record.fields for record in caplog.records)  # type: ignore[attr-defined]
    assert first.pop("client").startswith("127.0.0.1:")
    assert first == {"request_id": "r-1/\\xe9", "method": "POST", "path": "/a", "status": 404, "outcome": "engine_error", "ms": 0.0}
    assert (second["status"], second["outcome"]) == (503, "engine_lost")
    assert "secret" not in caplog.text
