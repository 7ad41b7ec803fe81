"""A line for each request that is over (`--access-log`): what was asked for by whom, how it ended, how long it took.

Law: never a body, a query or a field but the request's own id. Costs nothing where it is off: nobody makes one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import Context

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polykv_proxy.api.relay.exchange import Exchange
from polykv_proxy.core.request_ids import request_id_of, shown
from polykv_proxy.observability.logs import say

log = logging.getLogger("polykv.access")
_PATH = 200


class AccessLog:
    """Watches the relay, and with `around` an application. `now` in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._begun: dict[Exchange, float] = {}

    def began(self, exchange: Exchange) -> Context | None:
        """A request that is relayed has begun."""
        self._begun[exchange] = self._now()
        return None

    def ended(self, exchange: Exchange) -> None:
        """It is over."""
        method, path = exchange.method, exchange.target.partition(b"?")[0]
        fields = _fields(method.decode("latin-1"), path.decode("latin-1"), exchange.client.client, exchange.request_id)
        fields["status"] = exchange.status or None
        fields["outcome"] = exchange.ending.value if exchange.ending else None
        fields["ms"] = _ms(self._now() - self._begun.pop(exchange, self._now()))
        say(log, "request", fields)

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application, each request of it with a line."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            begun, status = self._now(), 0

            async def seen(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, seen)
            finally:
                fields = _fields(scope["method"], scope["path"], scope.get("client"), request_id_of(scope["headers"]))
                say(log, "request", {**fields, "status": status or None, "outcome": "own", "ms": _ms(self._now() - begun)})

        return watched


def _fields(method: str, path: str, client: tuple[str, int] | None, request_id: bytes | None) -> dict[str, object]:
    named = {} if request_id is None else {"request_id": shown(request_id)}
    return {**named, "method": method, "path": path[:_PATH], "client": f"{client[0]}:{client[1]}" if client else None}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
