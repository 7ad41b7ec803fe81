"""One request and its reply: the pump between a client connection and an engine connection.

Law: runs in protocol callbacks of one loop. It answers to two connections and ends exactly once, by one of: reply complete,
refused, client gone, engine lost, cut. An exchange stands where uvicorn keeps a request cycle, so it carries that interface
(`response_complete`, `keep_alive`, `disconnected`, `message_event`).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from polykv_proxy.api.relay import heads
from polykv_proxy.api.relay.answer import Answer
from polykv_proxy.api.relay.heads import BadHeadError, Framing
from polykv_proxy.core.request_ids import shown
from polykv_proxy.core.tally import Ending
from polykv_proxy.errors import ApiError
from polykv_proxy.observability.logs import REQUEST_ID
from polykv_proxy.ports import Header, Plan, Refusal, RelayRequest, names_of

if TYPE_CHECKING:
    from polykv_proxy.api.relay.known import KnownReply, KnownRequest
    from polykv_proxy.api.relay.protocol import RelayProtocol
    from polykv_proxy.api.relay.reply import ReplyHead
    from polykv_proxy.api.relay.upstream import Upstream

_log = logging.getLogger(__name__)
_COMPLETE, _ENGINE_ERROR = Ending.COMPLETE, Ending.ENGINE_ERROR
_SMALL = 4096
_REPEATABLE = frozenset({b"GET", b"HEAD", b"OPTIONS"})


class _Nobody:
    """Stands where uvicorn keeps the event that wakes an ASGI task; an exchange has none."""

    def set(self) -> None: ...


class Exchange:
    """A relayed request. Made when its head is parsed, started when its turn on the connection comes."""

    message_event = _Nobody()

    # as each begins; here, not made anew for each
    more_body = True
    response_complete = disconnected = running = False
    ending: Ending | None = None
    context: contextvars.Context | None = None
    _since = 0.0
    _n_kept = 0
    _upstream: Upstream | None = None
    _task: asyncio.Task[None] | None = None
    _plan: Plan | None = None
    _retried = False

    def __init__(
        self,
        client: RelayProtocol,
        method: bytes,
        target: bytes,
        headers: list[Header],
        framing: Framing,
        *,
        http10: bool = False,
        keep_alive: bool = True,
        expects: bool = False,
        gated: bool = False,
        counted: bool = False,
        refuse: ApiError | Refusal | None = None,
        request_id: bytes | None = None,
        known: KnownRequest | None = None,
    ) -> None:
        self.client = client
        self.relay = client.relay
        self.method = method
        self.target = target
        self.headers = headers
        self.framing = framing
        self.keep_alive = keep_alive
        self.request_id = request_id
        self._expects = expects
        self._known = known
        self.generates = gated
        self._gated = gated and self.relay.gate is not None
        self._counted = counted
        self._refuse = refuse
        self._parts: list[bytes | bytearray] = []
        self.answer = Answer(client.transport.write, method, target, http10=http10, request_id=request_id)

    # the client's side

    def start(self) -> None:
        """Its turn on the client connection has come."""
        if self.response_complete:
            return
        self.running = True
        self._since = time.perf_counter()
        self.relay.enter(self)
        if self._gated and (self.framing.length or 0) > self.relay.limits.scanned_body:
            self._too_large()
            return
        refuse = self._refuse or self.relay.refusal
        if refuse is not None:
            self.keep_alive = self.keep_alive and not self.relay.draining
            self.refuse(refuse)
            return
        if self._expects and self.more_body:
            self.client.transport.write(heads.CONTINUE)
        if self._counted and self.relay.gate is not None:
            self._task = self.client.loop.create_task(self._decide(self.relay.gate.count()), context=self.context)
        elif not self._gated:
            self._acquire()
        elif not self.more_body:
            self._ask_gate()

    def feed(self, data: bytes) -> None:
        """Bytes of the request's body, without their framing."""
        if self.response_complete or self._refuse is not None:
            return
        if self._upstream is not None:
            self._upstream.write(heads.chunk(data) if self.framing.chunked else data)
            return
        if self._parts and len(data) < _SMALL:
            self._keep_small(data)
        else:
            self._parts.append(data)
        self._n_kept += len(data)
        if not self._gated:
            if self._n_kept >= self.relay.limits.buffered:
                self.client.hold_reading()
        elif self._n_kept > self.relay.limits.scanned_body:
            self._too_large()

    def _keep_small(self, data: bytes) -> None:
        """A client may cut its body into chunks of a byte: each by itself would cost many times its size."""
        last = self._parts[-1]
        if isinstance(last, bytearray):
            last += data
        else:
            self._parts.append(bytearray(data))

    def feed_end(self) -> None:
        """The request is complete."""
        self.more_body = False
        if self.response_complete:
            return
        if self._upstream is not None:
            if self.framing.chunked:
                self._upstream.write(heads.LAST_CHUNK)
        elif self._gated and self.running:
            self._ask_gate()

    def client_gone(self) -> None:
        """The client left: the engine's connection is closed at once, whatever it is doing."""
        self.disconnected = True
        self._ends_by(Ending.CLIENT_GONE)
        self._end()

    def client_writable(self, ok: bool) -> None:
        """Back-pressure of the client connection."""
        if self._upstream is not None:
            if ok:
                self._upstream.resume()
            else:
                self._upstream.pause()

    def refuse(self, error: ApiError | Refusal) -> None:
        """Answer in place of the engine."""
        self._ends_by(Ending.REFUSED)
        if not self.response_complete:
            self.answer.refuse(error, keep_alive=self._keeps_if_answered())
            self._close()

    def spoil(self, error: ApiError) -> None:
        """The rest of the request will never come, or must not be read: answer `error` when its turn comes, then close."""
        self.keep_alive = False
        if self.running:
            self._ends_by(Ending.REFUSED)
            self.cut(error)
        else:
            self._refuse = error
            self._parts.clear()

    def cut(self, error: ApiError) -> None:
        """End now although the engine goes on."""
        self._ends_by(Ending.CUT)
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()
        self._break_off(error)

    @property
    def is_plain(self) -> bool:
        """Does it ask for nothing but the engine's answer to it, on a connection that is kept?"""
        return self.keep_alive and self._refuse is None and not self._expects and not self._counted and self.request_id is None

    @property
    def status(self) -> int:
        """That of the head that the client got; 0 while it has none."""
        return self.answer.status

    @property
    def owed(self) -> bool:
        """Does the engine owe this request, on a generating route, the next step?

        1. It is not with the engine yet: the gate or a connection is waited for. 2. The engine does not take the body.
        3. The client is still sending, or does not read what there is: the engine owes nothing. 4. Else it does.
        """
        if not self.generates or self.response_complete:
            return False
        if self._upstream is None:
            return self._task is not None
        if self.more_body:
            return not self._upstream.writable
        return not self.client.flow.write_paused

    # the gate

    def _ask_gate(self) -> None:
        self._since = time.perf_counter()
        body = b"".join(self._parts)
        self._parts = [body]
        self.framing = Framing(length=len(body))
        names = self._known.fields.names if self._known is not None else names_of(self.headers)
        request = RelayRequest(self.method, self.target, self.headers, body, names)
        gate = self.relay.gate
        try:
            concerned = gate is not None and gate.concerns(request)
        except Exception:
            _log.exception("the scan of a request failed; it is relayed as it came")
            concerned = False
        if concerned and gate is not None:
            self._task = self.client.loop.create_task(self._decide(gate.plan(request, self._begin_stream)), context=self.context)
        else:
            self._acquire()

    def _begin_stream(self, events: bytes) -> None:
        """The client's event stream begins, or goes on, although the engine has not answered."""
        self.answer.begin_stream(events, keep_alive=self.keep_alive)

    async def _decide(self, asked: Awaitable[Plan | Refusal]) -> None:
        if self.request_id is not None:
            REQUEST_ID.set(shown(self.request_id))
        try:
            outcome = await asked
        except ApiError as error:
            self.refuse(error)
            return
        except Exception:
            _log.exception("no decision about a request")
            self.refuse(
                ApiError("internal_error", "The proxy failed while it decided about this request; its log has the details.")
            )
            return
        if isinstance(outcome, Refusal):
            self.refuse(outcome)
            return
        if self.response_complete:  # it left, and the gate finished all the same
            outcome.done()
            return
        self._plan = outcome
        since, self._since = self._since, time.perf_counter()
        self.relay.tally.plan_s.add(self._since - since)
        refuse = self.relay.pool.refusal
        if refuse is not None:
            self.refuse(refuse)
        else:
            await self._connect_or_take()

    # the engine's side: request

    def _acquire(self) -> None:
        upstream = self.relay.pool.take(repeatable=self._repeatable)
        if upstream is not None:
            self._send(upstream)
        else:
            self._task = self.client.loop.create_task(self._connect())

    async def _connect_or_take(self) -> None:
        upstream = self.relay.pool.take(repeatable=False)
        if upstream is not None:
            self._send(upstream)
        else:
            await self._connect()

    async def _connect(self) -> None:
        try:
            upstream = await self.relay.pool.connect()
        except OSError as error:
            self.relay.on_lost()
            self.refuse(self.relay.pool.refusal or _away(f"The engine does not answer ({error.strerror or error})."))
            return
        if self.response_complete:
            upstream.abort()
        else:
            self._send(upstream)

    @property
    def _may_be_amended(self) -> bool:
        return self.relay.additions is not None and self.method == b"GET"

    @property
    def _repeatable(self) -> bool:
        return self.method in _REPEATABLE and not self.framing.chunked and not self.framing.length

    def _send(self, upstream: Upstream) -> None:
        self._task = None
        extra = self._plan.engine_headers if self._plan is not None else ()
        try:
            if self._known is not None and not extra:
                head = heads.with_length(self._known.engine_head, self.framing)
            else:
                head = heads.request_head(self.method, self.target, self.headers, self.framing, extra)
        except BadHeadError as error:
            self.relay.pool.release(upstream)
            self.refuse(ApiError("invalid_request", f"The request is not valid HTTP: {error}."))
            return
        if not self._retried:
            self.relay.tally.delay_s.add(time.perf_counter() - self._since)
        self._upstream = upstream
        upstream.begin(self, head + self._take_body(), head_only=self.method == b"HEAD")
        if self.client.flow.write_paused:
            upstream.pause()
        if upstream.writable and self.client.flow.read_paused:
            self.client.let_read()

    def _take_body(self) -> bytes:
        body = b"".join(self._parts)
        self._parts.clear()
        if not self.framing.chunked:
            return body
        return (heads.chunk(body) if body else b"") + (b"" if self.more_body else heads.LAST_CHUNK)

    def upstream_writable(self, ok: bool) -> None:
        """Back-pressure of the engine connection."""
        if self.more_body:
            if ok:
                self.client.let_read()
            else:
                self.client.hold_reading()

    # the engine's side: reply

    def upstream_head(self, came: ReplyHead) -> None:
        """The engine's answer begins."""
        extra = () if self._plan is None else self._reply_headers(self._plan, came)
        amend = self.relay.amendment(self.method, self.target)
        try:
            self.answer.head(came, extra, amend, keep_alive=self.keep_alive)
        except BadHeadError as error:
            self.cut(ApiError("engine_protocol", f"The engine's reply cannot be relayed: {error}."))

    def upstream_known(self, one: KnownReply, digits: bytes) -> None:
        """The same, with a head that was read before."""
        if self._plan is None and self.keep_alive and self.answer.adds_nothing and not self._may_be_amended:
            self.answer.known(one.status, one.relayed(digits))
        else:
            self.upstream_head(one.head(digits))

    @staticmethod
    def _reply_headers(plan: Plan, came: ReplyHead) -> Sequence[Header]:
        try:
            return plan.reply_headers(came.status, came.headers)
        except Exception:
            _log.exception("the headers of a reply could not be made; it goes without them")
            return ()

    def upstream_complete(self, *, keep: bool) -> None:
        """The reply is whole."""
        self._ends_by(_ENGINE_ERROR if self.answer.failed else _COMPLETE)
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            if keep and not self.more_body:
                self.relay.pool.release(upstream)
            else:
                upstream.abort()
        if not self.response_complete:
            self.answer.end()
            self._close()

    def upstream_lost(self, why: str) -> None:
        """The engine connection ended before the reply did.

        1. Nothing of a reply seen on a kept connection and the request may be repeated: once more, on a new connection.
        2. No head sent: 503. 3. An event stream: one error event. 4. Anything else: the client connection is cut.
        """
        upstream, self._upstream = self._upstream, None
        reused = upstream is not None and upstream.n_served > 0 and not upstream.began
        if reused and self._repeatable and not self._retried:
            self._retried = True
            self._task = self.client.loop.create_task(self._connect())
            return
        self.relay.on_lost()
        self._ends_by(Ending.ENGINE_LOST)
        self._break_off(self.relay.pool.refusal or _away(f"{why[0].upper()}{why[1:]} before the answer was complete."))

    def _break_off(self, error: ApiError) -> None:
        if not self.response_complete:
            self.answer.break_off(error, keep_alive=self._keeps_if_answered())
            self._close()

    # the end

    def _ends_by(self, ending: Ending) -> None:
        """Why it ends; the first reason counts."""
        self.ending = self.ending or ending

    def _too_large(self) -> None:
        limit = self.relay.limits.scanned_body
        self.spoil(ApiError("body_too_large", f"The body is larger than the {limit} bytes that this route takes: send less."))

    def _keeps_if_answered(self) -> bool:
        """Can the connection be kept after an answer of ours? A body that waits for `100 Continue` may come, or never."""
        self.keep_alive = self.keep_alive and not (self.more_body and self._expects)
        return self.keep_alive

    def _close(self) -> None:
        if self.response_complete:
            return
        linger = self.more_body
        self._end()
        self.keep_alive = self.keep_alive and self.answer.keeps
        if not self.keep_alive:
            self.client.close(linger=linger)
        self.client.on_response_complete()

    def _end(self) -> None:
        """Idempotent: lets go of the engine connection, the task and the plan."""
        self.response_complete = True
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.abort()
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task(self.client.loop):
            task.cancel()
        self._parts.clear()
        plan, self._plan = self._plan, None
        if self.running:
            self.running = False
            self.relay.leave(self)
        if plan is not None:
            plan.done()


def _away(message: str) -> ApiError:
    return ApiError("engine_unavailable", message, retry_after_s=1)
