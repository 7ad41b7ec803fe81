"""Spans of requests (`--otel`): below the caller's, with attach and the engine's work below them; nothing is changed on the way."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from polykv_proxy.api.relay import Relay, UpstreamPool
from polykv_proxy.api.traces import Traces
from polykv_proxy.engine.traced_client import TracedClient
from polykv_proxy.ports import EngineAddress
from tests.fakes.fake_engine_program import WithFakeEngine
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import Do, Stub, reply
from tests.integration.rig import relayed, rig

TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
CALLER = {"traceparent": f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01", "tracestate": "a=b"}
TEXT = "text-that-stays-out"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(spans: InMemorySpanExporter) -> Iterator[Traces]:
    made = Traces(SimpleSpanProcessor(spans), "1")
    yield made
    made.close()


def _by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


async def test_an_attach_that_rebuilds_a_pool_is_seen_whole(spans: InMemorySpanExporter, traces: Traces, tmp_path: Path) -> None:
    """The caller's span, the request, its attach, and below that what the engine did for it: one trace."""
    async with rig(tmp_path, client=lambda *args, **options: TracedClient(traces.tracer, *args, **options)) as proxy:
        await proxy.pool(prompt=f"{TEXT} b c d", name="p")
        await proxy.api.post("/polykv/pools/p/evict")
        async with relayed(proxy) as (relay, client):
            relay.observers.append(traces)
            relay.gate = traces.gate(proxy.gate)
            spans.clear()
            headers = {**CALLER, "x-request-id": "r-1"}
            got = await client.post(
                "/v1/chat/completions?q=1", json={"prompt": TEXT, "messages": [], "pool_id": "p"}, headers=headers
            )
            assert got.status_code == 400  # the engine's word, on a body without messages
            got = await client.post("/completion", json={"prompt": f"{TEXT} b c d e", "pool_id": "p"}, headers=headers)
            assert got.status_code == 200
    found = [span for span in spans.get_finished_spans() if span.context.trace_id == TRACE_ID]
    assert {span.name for span in found} >= {"POST /completion", "POST /v1/chat/completions", "attach", "engine make_seq"}
    named = _by_name(spans)
    whole, make = named["POST /completion"], named["engine make_seq"]
    attaches = {span.context.span_id: span for span in found if span.name == "attach"}
    assert whole.parent.span_id == PARENT_ID
    assert attaches[make.parent.span_id].parent.span_id == named["POST /v1/chat/completions"].context.span_id
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["polykv.pool_id"] == 1
    assert whole.attributes["polykv.cached_prefix_tokens"] > 0
    assert whole.attributes["polykv.outcome"] == "complete"
    assert whole.attributes["polykv.request_id"] == "r-1"
    assert TEXT not in "".join(span.to_json() for span in found)


def test_what_fails_is_marked_and_what_is_plain_is_short(spans: InMemorySpanExporter, traces: Traces) -> None:
    """A lost engine is an error; paths that are no route of ours do not name a span; the caller's fields cross untouched."""
    with Stub(lambda seen: [Do.DROP] if seen.target == b"/lost" else reply()) as stub:  # noqa: SIM117 - one line is too long
        with RelayRig(EngineAddress(port=stub.port)) as proxy:
            proxy.on_loop(lambda: proxy.relay.observers.append(traces))
            fields = "".join(f"{name}: {value}\r\n" for name, value in CALLER.items()).encode()
            proxy.send(request(b"GET", b"/files/a/b", None, fields))
            proxy.send(request(b"POST", b"/lost", b"{}"))
            assert stub.requests[0].header(b"traceparent") == [CALLER["traceparent"].encode()]
    plain, lost = spans.get_finished_spans()
    assert (plain.name, plain.attributes["url.path"], plain.status.is_ok) == ("GET", "/files/a/b", True)
    assert (lost.attributes["error.type"], lost.attributes["http.response.status_code"], lost.status.is_ok) == (
        "engine_lost",
        503,
        False,
    )
    assert lost.parent is None


async def test_our_own_routes_have_spans_by_route(spans: InMemorySpanExporter, traces: Traces, tmp_path: Path) -> None:
    """The template names the span, not the path."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt="a b", name="p")
        transport = httpx.ASGITransport(traces.around(proxy.app))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            await client.post("/polykv/pools/p/evict", headers=CALLER)
            await client.get("/polykv/nothing")
    evict, nothing = spans.get_finished_spans()
    assert (evict.name, evict.parent.span_id) == ("POST /polykv/pools/{key}/evict", PARENT_ID)
    assert (nothing.name, nothing.attributes["http.response.status_code"]) == ("GET", 404)


def test_spans_go_out_by_otlp(tmp_path: Path) -> None:
    """To where the OTEL variables say, the last of them at the stop, under our name."""
    got: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        }
        with WithFakeEngine.running(tmp_path, "--otel", variables=variables) as served:
            body = {"prompt": "a b c", "session_id": "s"}
            assert httpx.post(served.url + "/completion", json=body, trust_env=False).status_code == 200
            assert served.stop() == 0
        server.shutdown()
    assert {path for path, _ in got} == {"/v1/traces"}
    told = b"".join(data for _, data in got)
    assert b"polykv-proxy" in told
    assert b"POST /completion" in told
    assert b"attach" in told


def test_nothing_of_it_is_there_where_it_is_off() -> None:
    """The kit is not even loaded, and nobody watches the relay."""
    check = "import sys, polykv_proxy.bootstrap; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
    assert Relay(UpstreamPool()).observers == []
