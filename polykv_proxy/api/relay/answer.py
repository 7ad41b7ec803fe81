"""What a client gets for one request: the engine's reply, at once or when something is added to it, or an answer of ours.

Law: decides what is sent; when an exchange ends, and by what, is the exchange's business. An engine connection hands it the bytes
of a reply (`body`, then `flush`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from polykv_proxy.api.relay import heads
from polykv_proxy.api.relay.early import EarlyStream
from polykv_proxy.api.relay.held import Held, can_be_held
from polykv_proxy.api.relay.reply import Reply, ReplyHead
from polykv_proxy.api.relay.sse import error_event
from polykv_proxy.api.relay.targets import decoded_path
from polykv_proxy.core.request_ids import FIELD, request_id_of
from polykv_proxy.errors import ApiError
from polykv_proxy.ports import Header, Refusal

Amend: TypeAlias = Callable[[bytes], bytes | None]
"""Makes another page of a whole one, or None."""
_ERROR = 400


class Answer:
    """Of one exchange. `status` is that of the head that was sent. `keeps`: the client's connection can be used again after it."""

    status = 0
    keeps = True
    _failed = False
    _early: EarlyStream | None = None
    _held: Held | None = None
    _extra: Sequence[Header] = ()

    def __init__(
        self, write: Callable[[bytes], None], method: bytes, target: bytes, *, http10: bool, request_id: bytes | None = None
    ) -> None:
        self._write = write
        self._method = method
        self._target = target
        self._request_id = request_id
        self._reply = Reply(write, http10=http10)
        self.flush = self._reply.flush

    # of the engine

    @property
    def failed(self) -> bool:
        """Is the engine's reply an error, by its status or by an event of its stream?"""
        return self._failed or self._reply.failed

    def head(self, came: ReplyHead, extra: Sequence[Header], amend: Amend | None, *, keep_alive: bool) -> None:
        """Goes to the client at once, or when the body is whole. BadHeadError: it must not be relayed."""
        self._failed = came.status >= _ERROR
        if self._early is not None:
            self._early.head(came)
            return
        self.status = came.status
        extra = self._named(extra, came.headers)
        if amend is not None and can_be_held(came):
            self._held, self._extra, self.keeps = Held(came, amend), extra, keep_alive
        else:
            self.keeps = self._reply.head(came, extra, keep_alive=keep_alive)

    @property
    def adds_nothing(self) -> bool:
        """Would a head of the engine go out as it came?"""
        return self._early is None and self._request_id is None

    def known(self, status: int, head: bytes) -> None:
        """A head that is ready, of a body with a length: it `adds_nothing`."""
        self._failed = status >= _ERROR
        self.status = status
        self._reply.ready(head)

    def body(self, data: bytes) -> None:
        """Bytes of the body."""
        if self._held is not None:
            if not self._held.feed(data):
                self._let_go(self._held.head, bytes(self._held.body))
        elif self._early is None or not self._early.keeps(data):
            self._reply.body(data)

    def end(self) -> None:
        """The engine's reply is whole."""
        if self._held is not None:
            self._let_go(*self._held.whole())
        error = self._early.error() if self._early is not None else None
        if error is not None:
            self._cut(error)
        else:
            self._reply.end()

    def _let_go(self, head: ReplyHead, body: bytes) -> None:
        self._held = None
        self.keeps = self._reply.head(head, self._extra, keep_alive=self.keeps)
        self._reply.body(body)

    # of ours

    def begin_stream(self, events: bytes, *, keep_alive: bool) -> None:
        """The client's event stream begins, or goes on, although the engine has not answered."""
        if self._early is None:
            self._early = EarlyStream(self._reply)
            self.status = 200
            self.keeps = self._early.begin(self._named(()), keep_alive=keep_alive)
        self._reply.body(events)
        self._reply.flush()

    def refuse(self, error: ApiError | Refusal, *, keep_alive: bool) -> None:
        """Answer in place of the engine, which has sent no head."""
        if self._early is not None:
            self._cut(error if isinstance(error, ApiError) else self._early.error_of(error.body))
        elif isinstance(error, Refusal):
            self._whole(error.status, error.headers, error.body, keep_alive=keep_alive)
        else:
            self._whole(error.status, error.headers(), error.body(), keep_alive=keep_alive)

    def break_off(self, error: ApiError, *, keep_alive: bool) -> None:
        """End it wherever it is. 1. Nothing sent: the error. 2. An event stream: one error event. 3. Anything else just stops."""
        if not self._reply.begun:
            self.refuse(error, keep_alive=keep_alive)
        elif self._reply.streams:
            self._cut(error)
        else:
            self._reply.flush()
            self.keeps = False

    def _cut(self, error: ApiError) -> None:
        self._reply.cut(error_event(decoded_path(self._target), error.code, error.kind.type, error.message))

    def _whole(self, status: int, headers: Sequence[Header], body: bytes, *, keep_alive: bool) -> None:
        self.status = status
        self._write(heads.answer(status, self._named(headers), body, head_only=self._method == b"HEAD", close=not keep_alive))

    def _named(self, added: Sequence[Header], there: Sequence[Header] = ()) -> Sequence[Header]:
        """With the client's id of its request, where it gave one and the engine does not return it itself."""
        if self._request_id is None or request_id_of(there) is not None:
            return added
        return [*added, (FIELD, self._request_id)]
