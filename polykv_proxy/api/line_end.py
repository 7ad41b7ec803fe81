"""JSON answers of ours end with a line end, so that what follows them in a terminal stands on a line of its own.

Law: in front of the routes, so that none can forget it. Streams, pages and answers without a body are as they were.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LineEnd:
    """Adds one byte to each JSON body whose length is known."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ends = False

        async def ended(message: Message) -> None:
            nonlocal ends
            if message["type"] == "http.response.start":
                ends = _lengthen(MutableHeaders(raw=message["headers"]))
            elif ends and not message.get("more_body", False):
                message = {**message, "body": message.get("body", b"") + b"\n"}
            await send(message)

        await self._app(scope, receive, ended)


def _lengthen(headers: MutableHeaders) -> bool:
    """Make room for one byte in the head of a JSON answer."""
    length = headers.get("content-length", "0")
    if length == "0" or not headers.get("content-type", "").startswith("application/json"):
        return False
    headers["content-length"] = str(int(length) + 1)
    return True
