"""The reply of one exchange on its way to the client: head, body in the client's framing, and an end.

Law: everything of one read of the engine goes out in one write. It knows the client connection only as something to write to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from polykv_proxy.api.relay import heads
from polykv_proxy.api.relay.heads import Framing
from polykv_proxy.api.relay.sse import SseTail, sse_of
from polykv_proxy.ports import Header


class ReplyHead(NamedTuple):
    """The head as the engine sent it. `bodiless`: nothing follows it, whatever it says."""

    status: int
    reason: bytes
    headers: list[Header]
    framing: Framing
    bodiless: bool = False


class Reply:
    """Begins with `head`, ends with `end` or `cut`."""

    begun = False
    _chunked = _bodiless = False
    _sse: SseTail | None = None

    def __init__(self, write: Callable[[bytes], None], *, http10: bool) -> None:
        self._write = write
        self._http10 = http10
        self._out: list[bytes] = []

    @property
    def streams(self) -> bool:
        """Is it an event stream, which can end with an event of ours?"""
        return self._sse is not None

    @property
    def failed(self) -> bool:
        """Was an event of the stream an error, whatever the status says?"""
        return self._sse is not None and self._sse.failed

    def head(self, came: ReplyHead, extra: Sequence[Header], *, keep_alive: bool) -> bool:
        """Make the head anew. Whether the client's connection can be kept after it; BadHeadError when it must not be relayed."""
        framing, self._bodiless = came.framing, came.bodiless
        self._chunked = not came.bodiless and framing.length is None and not self._http10
        keep_alive = keep_alive and (came.bodiless or framing.length is not None or self._chunked)
        head = heads.reply_head(
            came.status,
            came.reason,
            came.headers,
            keep_length=framing.length is not None and not framing.chunked and came.status != 204,
            chunked=self._chunked,
            close=not keep_alive,
            extra=extra,
        )
        if came.status == 200 and not came.bodiless and framing.length is None:
            self._sse = sse_of(came.headers)
        self.ready(head)
        return keep_alive

    def ready(self, head: bytes) -> None:
        """The head, already made, of a body with a length."""
        self._out.append(head)
        self.begun = True

    def body(self, data: bytes) -> None:
        """Bytes of the body."""
        if self._sse is not None:
            data = self._sse.feed(data)
        if data and not self._bodiless:
            self._out.append(heads.chunk(data) if self._chunked else data)

    def flush(self) -> None:
        """Write what there is."""
        if self._out:
            out, self._out = self._out, []
            self._write(out[0] if len(out) == 1 else b"".join(out))

    def end(self) -> None:
        """The body is whole."""
        self._finish(self._sse.end() if self._sse is not None else b"")

    def cut(self, event: bytes) -> None:
        """An event stream ends here, with this event."""
        assert self._sse is not None
        self._finish(self._sse.cut(event))

    def _finish(self, data: bytes) -> None:
        if data:
            self._out.append(heads.chunk(data) if self._chunked else data)
        if self._chunked:
            self._out.append(heads.LAST_CHUNK)
        self.flush()
