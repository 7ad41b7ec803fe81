"""The end of an event stream that the engine did not finish.

Law: pure. Bytes go through unchanged; the start of an unfinished event is held back until its end arrives, so that a stream
cut by the engine's death can be closed with one whole error event. A body that ends normally is byte for byte what the engine sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from polykv_proxy.ports import Header

_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n|\r\r|\n\r\n|\r\n\n")
_HOLD_LIMIT = 256 * 1024
_FINISHED = (b"data: [DONE]", b"data:[DONE]", b"event: message_stop", b"event: response.completed")
_TAIL = 64
_ERROR = re.compile(rb'(?:^|[\r\n])(?:error: ?\{|event: ?(?:error|response\.failed)[\r\n]|data: ?\{"error")')
"""How an event begins that is an error: as the protocols have it, and with a field of that name, as older engines wrote it."""


class SseTail:
    """Splits a stream of body bytes at the last event boundary. Holding costs memory, so beyond a limit bytes pass at once.

    `failed`: an event of the engine's was an error.
    """

    __slots__ = ("_held", "_last", "_open", "failed")

    def __init__(self) -> None:
        self.failed = False
        self._held = b""
        self._last = b""
        self._open = False

    def feed(self, data: bytes) -> bytes:
        """Bytes that may be sent on now."""
        if not self._held and data.endswith(b"\n\n"):
            self._note(data)
            return data
        data = self._held + data
        end = _last_boundary(data)
        if len(data) - end > _HOLD_LIMIT:
            self._held, self._open = b"", True
            return data
        self._held = data[end:]
        ready = data[:end]
        if ready:
            self._note(ready)
        return ready

    def end(self) -> bytes:
        """What is still held, for a body that ends normally."""
        held, self._held = self._held, b""
        return held

    def cut(self, event: bytes) -> bytes:
        """Last bytes of a body that the engine left unfinished: the held event where its lines are whole, then `event`.

        1. The stream had said that it is finished: nothing is added. 2. Bytes of an unfinished event have passed: a blank line
        closes it. 3. Held data lines are whole: they are closed and sent. 4. Anything else that is held is dropped.
        """
        held = self.end()
        if self._last.startswith(_FINISHED):
            return b""
        if self._open:
            return b"\n\n" + event
        if held.endswith((b"\n", b"\r")) and _is_data_line(held):
            return held + b"\n" + event
        return event

    def _note(self, data: bytes) -> None:
        self._open = False
        if b"error" in data and _ERROR.search(data):
            self.failed = True
        start = _last_boundary(data[:-1].rstrip(b"\r\n"))
        self._last = data[start : start + _TAIL]


def _last_boundary(data: bytes) -> int:
    end = data.rfind(b"\n\n") + 2
    if b"\r" not in data:
        return end if end > 1 else 0
    last = 0
    for match in _BOUNDARY.finditer(data):
        last = match.end()
    return last


def _is_data_line(held: bytes) -> bool:
    return held.rstrip(b"\r\n").splitlines()[-1].startswith(b"data") if held.strip() else False


def sse_of(headers: Sequence[Header]) -> SseTail | None:
    """A tail for a reply with these fields; None when it is no event stream in plain text."""
    kind = b""
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-encoding":
            return None
        if lower == b"content-type":
            kind = value.lower()
    return SseTail() if kind.startswith(b"text/event-stream") else None


_MESSAGES_KINDS = frozenset({"invalid_request_error", "not_found_error", "rate_limit_error"})
"""Error types of ours that the messages protocol has by the same name; all others are its `api_error`."""


def error_event(path: bytes, code: str, kind: str, message: str) -> bytes:
    """One error event in the protocol of the route: messages and responses name their events, the others do not."""
    error = {"message": message, "type": kind, "code": code, "param": None}
    if path.endswith(b"/messages"):
        named = {"type": kind if kind in _MESSAGES_KINDS else "api_error", "message": message}
        return b"event: error\ndata: " + _json({"type": "error", "error": named}) + b"\n\n"
    if path.endswith(b"/responses"):
        data = {"type": "error", "code": code, "message": message, "param": None, "error": error}
        return b"event: error\ndata: " + _json(data) + b"\n\n"
    return b"data: " + _json({"error": error}) + b"\n\n"


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()
