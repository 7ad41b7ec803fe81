"""The id of a request on our own routes: back to the caller, and beside what is logged meanwhile.

Law: around everything else, so that errors carry it too.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polykv_proxy.core.request_ids import FIELD, request_id_of, shown
from polykv_proxy.observability.logs import REQUEST_ID


class RequestIds:
    """Around an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        request_id = request_id_of(scope["headers"]) if scope["type"] == "http" else None
        if request_id is None:
            await self._app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (FIELD, request_id)]}
            await send(message)

        token = REQUEST_ID.set(shown(request_id))
        try:
            await self._app(scope, receive, named)
        finally:
            REQUEST_ID.reset(token)
