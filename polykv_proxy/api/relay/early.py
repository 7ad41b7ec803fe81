"""An event stream that began before the engine had answered: a request that waits for its turn, and shows that it lives.

Law: the status is out, so what goes wrong from now on is one error event; an event stream of the engine goes on where ours is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from polykv_proxy.api.relay.heads import Framing
from polykv_proxy.api.relay.reply import Reply, ReplyHead
from polykv_proxy.api.relay.sse import sse_of
from polykv_proxy.errors import KINDS, ApiError
from polykv_proxy.ports import Header

_HEADERS = [(b"Content-Type", b"text/event-stream"), (b"Cache-Control", b"no-cache")]
_LIMIT = 64 * 1024


class EarlyStream:
    """Of one exchange."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._failed: bytearray | None = None

    def begin(self, added: Sequence[Header], *, keep_alive: bool) -> bool:
        """The head goes out, with what is `added`. Whether the client's connection can be kept after it."""
        return self._reply.head(ReplyHead(200, b"OK", list(_HEADERS), Framing()), added, keep_alive=keep_alive)

    def head(self, came: ReplyHead) -> None:
        """The engine's head: of a stream that goes on, or of something else, which is an error by now."""
        if came.status != 200 or sse_of(came.headers) is None:
            self._failed = bytearray()

    def keeps(self, data: bytes) -> bool:
        """Is this part of an error, and not for the client?"""
        if self._failed is None:
            return False
        if len(self._failed) < _LIMIT:
            self._failed += data
        return True

    def error(self) -> ApiError | None:
        """What the engine answered in place of a stream; None when it streams."""
        return None if self._failed is None else self.error_of(bytes(self._failed))

    def error_of(self, body: bytes) -> ApiError:
        """An error body, of the engine or of ours, as one to send in a stream."""
        try:
            error = json.loads(body)["error"]
            code, message = error.get("code"), str(error["message"])
        except (ValueError, KeyError, TypeError, AttributeError):
            code, message = None, body.decode("utf-8", "replace")[:500] or "The engine refused this request."
        return ApiError(code if isinstance(code, str) and code in KINDS else "invalid_request", message)
