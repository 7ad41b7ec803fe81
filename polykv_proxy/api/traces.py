"""OpenTelemetry spans (`--otel`): one for each relayed request, its attach below it, and one for each call of our own routes.

Law: made only where it is wanted; imports what the extra `otel` brings. Reads the caller's `traceparent`, changes no field of
a request. A span never holds a body, a query or a key.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Sequence
from dataclasses import replace

from opentelemetry import context as otel_context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polykv_proxy.api.relay.exchange import Exchange
from polykv_proxy.api.relay.targets import decoded_path
from polykv_proxy.core.request_ids import request_id_of, shown
from polykv_proxy.core.tally import Ending, Route
from polykv_proxy.ports import Header, Plan, Refusal, RelayRequest, RequestGate, StreamStart

_PARENT = TraceContextTextMapPropagator()
_FAILED = 500
_SHOWN = {
    b"x-pool-id": "polykv.pool_id",
    b"x-session-id": "polykv.session_id",
    b"x-cached-prefix-tokens": "polykv.cached_prefix_tokens",
}


class Traces:
    """Watches the relay, with `gate` its gate, and with `around` an application. `processor` takes the spans."""

    def __init__(self, processor: SpanProcessor, version: str) -> None:
        ours = Resource({"service.name": "polykv-proxy", "service.version": version})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("polykv_proxy", version)
        self._open: dict[Exchange, Span] = {}

    def close(self) -> None:
        """Send what is left. Blocks."""
        self._provider.shutdown()

    # the relay

    def began(self, exchange: Exchange) -> contextvars.Context | None:
        """A relayed request has begun: what is decided about it is decided under its span."""
        method, path = exchange.method.decode("latin-1"), decoded_path(exchange.target).decode("utf-8", "replace")
        known = exchange.relay.routes.kind(exchange.target) is not Route.OTHER
        span = self._begin(method, path, path if known else None, exchange.headers)
        self._open[exchange] = span
        within = contextvars.copy_context()
        within.run(otel_context.attach, set_span_in_context(span))
        return within

    def ended(self, exchange: Exchange) -> None:
        """It is over."""
        span = self._open.pop(exchange, None)
        if span is None:
            return
        if exchange.ending is not None:
            span.set_attribute("polykv.outcome", exchange.ending.value)
        lost = exchange.ending in {Ending.ENGINE_LOST, Ending.CUT}
        _end(span, exchange.status, exchange.ending.value if lost and exchange.ending else None)

    def gate(self, gate: RequestGate) -> RequestGate:
        """The gate, with a span for each decision."""
        return _TracedGate(gate, self)

    # our own routes

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application, each request of it with a span."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status, failed = 0, None
            span = self._begin(scope["method"], scope["path"], None, scope["headers"])

            async def seen(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            token = otel_context.attach(set_span_in_context(span))
            try:
                await app(scope, receive, seen)
            except BaseException as error:
                failed = type(error).__name__
                raise
            finally:
                otel_context.detach(token)
                route = getattr(scope.get("route"), "path", None)
                if route is not None:
                    span.update_name(f"{scope['method']} {route}")
                    span.set_attribute("http.route", route)
                _end(span, status, failed)

        return traced

    def _begin(self, method: str, path: str, route: str | None, headers: Sequence[Header]) -> Span:
        carrier = {
            name.lower().decode("latin-1"): value.decode("latin-1") for name, value in headers if name[:5].lower() == b"trace"
        }
        attributes = {"http.request.method": method, "url.path": path}
        if route is not None:
            attributes["http.route"] = route
        if (request_id := shown(request_id_of(headers))) is not None:
            attributes["polykv.request_id"] = request_id
        name = f"{method} {route}" if route is not None else method
        return self.tracer.start_span(name, _PARENT.extract(carrier), SpanKind.SERVER, attributes)


class _TracedGate:
    """A gate whose decisions have spans, and whose plans tell the request's span what came of them."""

    def __init__(self, gate: RequestGate, traces: Traces) -> None:
        self._gate = gate
        self._traces = traces

    def concerns(self, request: RelayRequest) -> bool:
        return self._gate.concerns(request)

    def objection(self, headers: Sequence[Header]) -> Refusal | None:
        return self._gate.objection(headers)

    @property
    def counts(self) -> bool:
        return self._gate.counts

    def count(self) -> Awaitable[Plan | Refusal]:
        return self._gate.count()

    async def plan(self, request: RelayRequest, waiting: StreamStart) -> Plan | Refusal:
        """Under the span `attach`, which lasts while it waits for admission and for its pool."""
        whole = get_current_span()
        with self._traces.tracer.start_as_current_span("attach"):
            plan = await self._gate.plan(request, waiting)
        if isinstance(plan, Refusal):
            return plan
        reply = plan.reply_headers

        def told(status: int, headers: Sequence[Header]) -> Sequence[Header]:
            added = reply(status, headers)
            for name, value in added:
                if name in _SHOWN:
                    whole.set_attribute(_SHOWN[name], int(value) if value.isdigit() else value.decode("ascii", "replace"))
            return added

        return replace(plan, reply_headers=told)


def _end(span: Span, status: int, failed: str | None) -> None:
    if status:
        span.set_attribute("http.response.status_code", status)
    if failed is None and status >= _FAILED:
        failed = str(status)
    if failed is not None:
        span.set_attribute("error.type", failed)
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def otlp() -> SpanProcessor:
    """Sends spans by OTLP over HTTP, in batches, from a thread of its own; the `OTEL_…` variables say where to and how many."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - heavy
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    return BatchSpanProcessor(OTLPSpanExporter())
