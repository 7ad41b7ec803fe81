"""A client connection: parses requests, decides for each who answers it, keeps replies in order.

Law: an uvicorn HTTP protocol class. Requests for our own routes go through uvicorn to the ASGI application; all others become an
`Exchange` in the place of uvicorn's request cycle, so both kinds share one pipeline on one connection.
"""

from __future__ import annotations

import asyncio
import logging
import select
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polykv_proxy.api.relay import heads, refusals
from polykv_proxy.api.relay.exchange import Exchange
from polykv_proxy.api.relay.heads import NO_BODY, BadHeadError, Framing, framing_of, plain_head
from polykv_proxy.api.relay.known import Cut, cut
from polykv_proxy.api.relay.patience import Patience
from polykv_proxy.api.relay.targets import Where
from polykv_proxy.core.tally import Unwelcome
from polykv_proxy.errors import ApiError
from polykv_proxy.ports import Refusal

if TYPE_CHECKING:
    from polykv_proxy.api.relay.relay import Relay
    from polykv_proxy.ports import Header

_log = logging.getLogger(__name__)
_LINGER_S = 2.0
_WATCH_S = 0.5
_UNWELCOME = frozenset(Unwelcome)
_TO_LEARN = 4


class RelayProtocol(HttpToolsProtocol):
    """One client connection of a server whose relay is `relay`."""

    def __init__(self, *args: Any, relay: Relay, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.relay = relay
        self.timeout_keep_alive = relay.limits.keep_alive_s  # type: ignore[assignment]
        self._raw: list[Header] = []
        self._target = b""
        self._in_head = False
        self._dead = False
        self._declined = False
        self._active: Exchange | None = None
        self._own: Any = None
        self._moved = False
        self._still_bytes = 0
        self._n_read = 0
        self._n_fed = 0
        self._idle_since: float | None = None
        self._unfinished = False
        self._patience: Patience | None = None
        self._to_learn = _TO_LEARN

    # bytes in

    def data_received(self, data: bytes) -> None:
        if self._dead:
            return
        while data and not self._dead:
            data = self._read(data)
        if len(self.pipeline) >= self.relay.limits.pipelined:
            self.hold_reading()

    def _read(self, data: bytes) -> bytes:
        """Take these bytes in; what is left of them where the parser stops at the offer of another protocol."""
        unread: Cut | None = None
        if self._idle_since is not None and not self._unfinished and not self._still_bytes:
            unread = cut(data)
            if unread is not None and self._is_known(data, unread):
                return b""
        self._moved = False
        self._n_read = len(data)
        self._n_fed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._after_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            _log.error("a request could not be handled", exc_info=error.__context__ or error)
            self._reject(ApiError("internal_error", "The proxy failed on this request; its log has the details."))
        except httptools.HttpParserError as error:
            self._reject(refusals.invalid(error))
        if unread is not None and self._to_learn:
            self._learn(data, unread)
        if self._in_head or not self._moved or self._still_bytes:
            self._bound_head(len(data))
        if self._unfinished:
            self._wait_for_more()
        return b""

    def _is_known(self, data: bytes, came: Cut) -> bool:
        """Is it one whole request whose head was read before, on whatever connection? It begins without the parser."""
        shape, digits, end = came
        one = self.relay.known.get(shape)
        n = int(digits) if digits else 0
        if one is None or len(data) != end + n:
            return False
        self._idle_since = None
        exchange = Exchange(
            self,
            one.method,
            one.target,
            one.fields.saying(digits),
            Framing(n) if digits else NO_BODY,
            gated=one.generates,
            known=one,
        )
        if n:
            exchange.feed(data[end:])
        exchange.more_body = False
        self.cycle = exchange  # type: ignore[assignment]
        self._start(exchange)
        return True

    def _learn(self, data: bytes, came: Cut) -> None:
        """The parser has read a head that was not known: keep it, if another like it can go without the parser."""
        one = self.cycle
        if isinstance(one, Exchange) and one.is_plain and self.relay.learn(one, data, came):
            self._to_learn -= 1

    def _bound_head(self, size: int) -> None:
        """Reads in which no message begins or ends and no body comes are head, chunk framing or trailer: the parser keeps them."""
        self._still_bytes = 0 if self._moved else self._still_bytes + size
        if self._still_bytes > self.relay.limits.head or (self._in_head and self._head_is_too_large(self._raw)):
            self._reject(refusals.head_too_large(self.relay.limits.head))

    def _head_is_too_large(self, head: list[Header]) -> bool:
        """Is it, so far? Counted only when all bytes since the read in which it begins are too many."""
        limit = self.relay.limits.head
        return self._n_fed > limit and len(self._target) + sum(len(name) + len(value) + 4 for name, value in head) > limit

    def _wait_for_more(self) -> None:
        if self._patience is None:
            self._patience = Patience(self.relay.limits.stall_s, lambda: self.flow.read_paused, self._too_slow)
        self._patience.wait(in_head=self._in_head)

    def _too_slow(self) -> None:
        self._reject(refusals.too_slow(self.relay.limits.stall_s))

    def hold_reading(self) -> None:
        """Read no more for now. A client whose bytes are not read cannot be heard to leave, so it is looked at now and then."""
        if self.transport.is_closing() or self.flow.read_paused:
            return
        if self._patience is not None:
            self._patience.excuse()
        self.flow.pause_reading()
        self.loop.call_later(_WATCH_S, self._watch)

    def let_read(self) -> None:
        """Read again, unless many requests wait already: each read may bring thousands."""
        if len(self.pipeline) < self.relay.limits.pipelined:
            self.flow.resume_reading()

    def _watch(self) -> None:
        if self._dead or self.transport.is_closing() or not self.flow.read_paused:
            return
        if peer_has_left(self.transport.get_extra_info("socket").fileno()):
            self._client_gone()
            self.transport.abort()
        else:
            self.loop.call_later(_WATCH_S, self._watch)

    def _after_upgrade(self, rest: bytes) -> bytes:
        """The parser stops behind the head of a request that offers another protocol; HTTP goes on all the same, with these bytes.

        A declined offer leaves a request whose body is still to come: its head is parsed again without the offer.
        """
        if self._declined:
            self._declined = False
            version = self.parser.get_http_version().encode()
            head = plain_head(self.parser.get_method(), self._target, version, self._raw)
            rest = head + rest
        self.parser = httptools.HttpRequestParser(self)
        return rest

    # parser callbacks

    def on_message_begin(self) -> None:
        self._idle_since = None
        self._moved = True
        self._unfinished = True
        self._raw = []
        self._target = b""
        self._in_head = True
        self._n_fed = self._n_read

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._raw.append((name, value.rstrip(b" \t")))  # no part of the value; the parser takes it off in front only

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._dead:  # the rest of a read whose beginning ended the connection
            return
        head, self._raw = self._raw, []  # what comes now is a trailer, of which nothing is kept
        method = self.parser.get_method()
        if self.parser.should_upgrade():
            refusal = refusals.upgrade_refusal(method, head)
            if refusal is None:
                self._declined = True
                self._raw = head
            else:
                exchange = self._exchange(method, head, NO_BODY, refuse=refusal)
                exchange.keep_alive = exchange.keep_alive and method != b"CONNECT"  # what follows was meant for somebody else
                self._enqueue(exchange)
            return
        if self._head_is_too_large(head):
            self._reject(refusals.head_too_large(self.relay.limits.head))
            return
        try:
            framing = framing_of(head, self.parser.get_http_version())
        except BadHeadError as error:
            invalid = refusals.invalid(error)
            self._count(invalid)
            exchange = self._exchange(method, head, NO_BODY, refuse=invalid)
            exchange.keep_alive = False
            self._enqueue(exchange)
            return
        where = self.relay.routes.where(method, self._target)
        if where is Where.OWN:
            self._to_app(head)
        elif where is Where.PRIVATE:
            self._enqueue(self._exchange(method, head, framing, refuse=refusals.NOT_FOUND))
        elif where is Where.POOLLESS and self.relay.gate is not None:
            counted, refuse = self.relay.gate.counts, self.relay.gate.objection(head)
            self._enqueue(self._exchange(method, head, framing, counted=counted, refuse=refuse))
        else:
            self._enqueue(self._exchange(method, head, framing, gated=where is Where.GENERATE))

    def on_body(self, body: bytes) -> None:
        self._moved = True
        if isinstance(self.cycle, Exchange):
            self.cycle.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._moved = True
        self._unfinished = False
        if self._patience is not None:
            self._patience.over()
        if self._declined:
            return
        if isinstance(self.cycle, Exchange):
            self.cycle.feed_end()
        else:
            super().on_message_complete()

    # who answers

    def _exchange(
        self,
        method: bytes,
        head: list[Header],
        framing: Framing,
        *,
        gated: bool = False,
        counted: bool = False,
        refuse: ApiError | Refusal | None = None,
    ) -> Exchange:
        http10 = self.parser.get_http_version() == "1.0"
        expects, request_id = heads.notes_of(head)
        return Exchange(
            self,
            method,
            self._target,
            head,
            framing,
            http10=http10,
            keep_alive=not http10 and self.parser.should_keep_alive(),
            expects=expects and not http10,
            gated=gated,
            counted=counted,
            refuse=refuse,
            request_id=request_id if self.relay.echoes else None,
        )

    def _to_app(self, head: list[Header]) -> None:
        super().on_message_begin()
        self.url = self._target
        for name, value in head:
            super().on_header(name, value)
        super().on_headers_complete()

    def _enqueue(self, exchange: Exchange) -> None:
        waiting = self.cycle is not None and not self.cycle.response_complete
        self.cycle = exchange  # type: ignore[assignment]
        if waiting:
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]
        else:
            self._start(exchange)

    def _start(self, exchange: Exchange) -> None:
        self._active = exchange
        exchange.start()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, Exchange):
            # not at once: a row of requests that are all refused would nest as deep as it is long
            self._active = cycle
            self.loop.call_soon(cycle.start)
        else:
            self._active = None
            self._own = cycle
            super()._start_asgi_task(cycle, app)

    def _reject(self, error: ApiError) -> None:
        """Bytes that are no HTTP: the request they spoil is refused, whatever came before it is answered first, then we close."""
        if self._dead:
            return
        self._dead = True
        self._count(error)
        broken = self.cycle
        if self._in_head or broken is None or broken.response_complete or not broken.more_body:
            self._enqueue(Exchange(self, b"", b"", [], NO_BODY, keep_alive=False, refuse=error))
        elif isinstance(broken, Exchange):
            broken.spoil(error)
        else:
            self._spoil_own(broken, error)

    def _spoil_own(self, cycle: Any, error: ApiError) -> None:
        """The body of a request for the application cannot be read: say so in its place, if nothing was said yet."""
        for place, (waiting, _) in enumerate(self.pipeline):
            if waiting is cycle:
                refused = Exchange(self, b"", b"", [], NO_BODY, keep_alive=False, refuse=error)
                self.cycle = refused  # type: ignore[assignment]
                self.pipeline[place] = (refused, self.app)  # type: ignore[assignment]
                return
        if not cycle.response_started:
            self.transport.write(heads.answer(error.status, error.headers(), error.body(), head_only=False, close=True))
        self.transport.close()

    def close(self, *, linger: bool) -> None:
        """Close after what was written. `linger`: the client is still sending; it must be let read the answer before a reset."""
        self._dead = True
        if not linger:
            self.transport.close()
        elif not self.transport.is_closing():
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(_LINGER_S, self.transport.close)

    def on_response_complete(self) -> None:
        """The next request of the row begins, or the connection is idle."""
        self.server_state.total_requests += 1
        if (self._dead and not self.pipeline) or self.transport.is_closing():
            return
        self.flow.resume_reading()
        if not self.pipeline:
            self._idle_since = self.loop.time()
            return
        cycle, app = self.pipeline.pop()
        self._start_asgi_task(cycle, app)
        if len(self.pipeline) >= self.relay.limits.pipelined:
            self.hold_reading()

    # uvicorn's protocol interface

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.relay.tally.n_opened += 1
        if len(self.connections) > self.relay.limits.connections:
            self._turn_away()
            return
        self._idle_since = self.loop.time()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    def _turn_away(self) -> None:
        """One connection too many: told so at once, whatever it would have sent."""
        error = refusals.too_many()
        self._count(error)
        self.transport.write(heads.answer(error.status, error.headers(), error.body(), head_only=False, close=True))
        self.close(linger=True)

    def _count(self, error: ApiError) -> None:
        if error.code in _UNWELCOME:
            self.relay.tally.unwelcome[Unwelcome(error.code)] += 1

    def _close_if_idle(self) -> None:
        """One timer a connection, which looks again when its time is not up: starting one for each request costs more."""
        now = self.loop.time()
        idle_s = 0.0 if self._idle_since is None else now - self._idle_since
        if idle_s < self.timeout_keep_alive:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive - idle_s, self._close_if_idle)
        elif not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._own is not None and not self._own.response_complete:  # perhaps not the last of a row, which is all uvicorn tells
            self._own.disconnected = True
            self._own.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn forgets it after a reset, and the timer keeps all of this for its time
        self._dead = True
        self.relay.tally.n_closed += 1
        if self._patience is not None:
            self._patience.close()
        self._client_gone()

    def eof_received(self) -> None:
        """A client that closes its side has left: the engine must know at once, even if our last bytes are still unread."""
        if self._active is not None and not self._active.response_complete:
            self._client_gone()
            self.transport.abort()

    def _client_gone(self) -> None:
        for exchange in [self._active, *(cycle for cycle, _ in self.pipeline)]:
            if isinstance(exchange, Exchange) and not exchange.response_complete:
                exchange.client_gone()
        self.pipeline.clear()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._active is not None:
            self._active.client_writable(False)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._active is not None:
            self._active.client_writable(True)


def peer_has_left(fd: int) -> bool:
    """Has the peer closed its side, even with bytes of it still unread? One system call; False where the system cannot tell."""
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(0))
