"""One connection to the engine: writes a request, parses the reply, hands its parts to the exchange that uses it.

Law: knows nothing of clients. At most one exchange uses a connection at a time; without a user any byte from the engine ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import httptools

from polykv_proxy.api.relay.heads import BadHeadError, Framing, framing_of
from polykv_proxy.api.relay.known import Cut, KnownReply, cut, is_plain
from polykv_proxy.api.relay.reply import ReplyHead

if TYPE_CHECKING:
    from polykv_proxy.api.relay.answer import Answer
    from polykv_proxy.api.relay.upstream_pool import UpstreamPool
    from polykv_proxy.ports import Header

_BODILESS = frozenset({204, 304})
_RESET = struct.pack("ii", 1, 0)
_READ = 64 * 1024
_TO_LEARN = 8


class UpstreamUser(Protocol):
    """What a connection tells the exchange that uses it; the bytes of the reply go to its `answer`."""

    @property
    def answer(self) -> Answer: ...
    def upstream_head(self, came: ReplyHead) -> None: ...
    def upstream_known(self, one: KnownReply, digits: bytes) -> None: ...
    def upstream_complete(self, *, keep: bool) -> None: ...
    def upstream_lost(self, why: str) -> None: ...
    def upstream_writable(self, ok: bool) -> None: ...


class Upstream(asyncio.Protocol):
    """An engine connection. `n_served` counts replies, `counted` is the pool's, `began`: a byte of the current reply was seen."""

    def __init__(self, pool: UpstreamPool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport | None = None
        self.user: UpstreamUser | None = None
        self.idle_since = 0.0
        self.n_served = 0
        self.counted = False
        self.began = False
        self.writable = True
        self._poll: Callable[[int], list[tuple[int, int]]] | None = None
        self._reading_paused = False
        self._tcp = False
        self._parser: Any = httptools.HttpResponseParser(self)
        self._head_only = False
        self._to_learn = _TO_LEARN
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._reason = b""
        self._headers: list[Header] = []
        self._in_body = False
        self._until_close = False
        self._complete = False
        self._keep = False
        self._dirty = False
        self._left = 0

    # use

    def begin(self, user: UpstreamUser, head: bytes, *, head_only: bool) -> None:
        """Start an exchange: `head` is written at once; `head_only` (HEAD): the reply has no body, whatever its head says."""
        self.user = user
        self.began = False
        self._head_only = head_only
        self._reset()
        self.write(head)

    def write(self, data: bytes) -> None:
        """Send bytes of the request."""
        if self.transport is not None:
            self.transport.write(data)

    def pause(self) -> None:
        """Stop reading the reply: the client is slower than the engine."""
        if self.transport is not None and not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.transport is not None and self._reading_paused:
            self._reading_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def abort(self) -> None:
        """Close now, unsent bytes dropped: the engine sees the peer leave and stops computing."""
        if self.transport is None:
            return
        if self.user is not None and self._tcp and not self.transport.is_closing():
            # a plain close would wait behind request bytes that the engine does not take
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.user = None
        self.transport.abort()

    def looks_open(self) -> bool:
        """True unless the engine has closed (or written to) this idle connection. One system call."""
        if self.transport is None or self.transport.is_closing():
            return False
        if self._poll is None:
            sock = self.transport.get_extra_info("socket")
            poll = select.poll()
            poll.register(sock.fileno(), select.POLLIN | select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0))
            self._poll = poll.poll
        return not self._poll(0)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it
        sock = transport.get_extra_info("socket")
        self._tcp = sock is not None and sock.family != socket.AF_UNIX
        if self._tcp:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        user = self.user
        if user is None:
            self.abort()
            return
        if self._left:
            self._count(user, data)
            return
        unread: Cut | None = None
        if not self.began:
            self.began = True
            unread = None if self._head_only else cut(data)
            if unread is not None and self._is_known(user, data, unread):
                return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._give_up(f"the engine's reply is not HTTP: {error or type(error).__name__}")
                return
            self._dirty = True
        if self.user is not user:
            return
        if unread is not None and self._to_learn:
            self._learn(data, unread)
        user.answer.flush()
        if self._complete:
            self._finish()

    def _is_known(self, user: UpstreamUser, data: bytes, came: Cut) -> bool:
        """Was the head of this reply read before, on whatever connection? Then its body is counted, and the parser not needed."""
        shape, digits, end = came
        one = self.pool.known.get(shape)
        if one is None:
            return False
        self._keep = True
        self._left = int(digits)
        user.upstream_known(one, digits)
        if self.user is user:
            self._count(user, data[end:])
        return True

    def _count(self, user: UpstreamUser, data: bytes) -> None:
        """Bytes of a body whose length is known, and perhaps more than that."""
        left = self._left - len(data)
        if left < 0:
            self._dirty = True
            data = data[:left]
        if data:
            user.answer.body(data)
        if left > 0:
            self._left = left
            user.answer.flush()
        else:
            self._left = 0
            self._complete = True
            self._finish()

    def _learn(self, data: bytes, came: Cut) -> None:
        """The parser has read a head that was not known: keep it, if another like it can go without the parser."""
        if not self._keep or self._status in _BODILESS:
            return
        framing = _framing(self._headers)
        first = b"HTTP/1.1 %d %b" % (self._status, self._reason)
        if framing.length is None or not is_plain(data, came, first, self._headers, framing):
            return
        made = KnownReply.of(self._status, self._reason, self._headers)
        if made is not None:
            self.pool.known.learn(came[0], made)
            self._to_learn -= 1

    def eof_received(self) -> bool:
        if self.user is not None and self._until_close and not self._complete:
            self._complete = True
            self.user.answer.flush()
            self._finish()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self.user is not None and (rest := _unread(self.transport)):
            self.data_received(rest)
        self.pool.forget(self)
        self._parser = None
        if self.user is not None:
            if self._until_close and exc is None:
                self._finish()
            else:
                self._give_up("the engine closed the connection")
        self.transport = None

    def pause_writing(self) -> None:
        self.writable = False
        if self.user is not None:
            self.user.upstream_writable(False)

    def resume_writing(self) -> None:
        self.writable = True
        if self.user is not None:
            self.user.upstream_writable(True)

    # parser callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            self._dirty = True
        elif 100 <= self._status < 200:
            self._reset()

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        self._status = status = self._parser.get_status_code()
        if 100 <= status < 200:
            return
        self._in_body = True
        bodiless = self._head_only or status in _BODILESS
        framing = _framing(self._headers)
        self._until_close = not bodiless and framing.length is None and not framing.chunked
        # llama-server says keep-alive on chunked replies and closes right after them: using such a connection again is a race
        self._keep = self._parser.should_keep_alive() and not self._until_close and not framing.chunked
        if self.user is not None:
            self.user.upstream_head(ReplyHead(status, self._reason, self._headers, framing, bodiless))
        if bodiless:
            self._keep = self._keep or (self._head_only and not _says_close(self._headers))
            self._complete = True

    def on_body(self, data: bytes) -> None:
        if self._complete:
            self._dirty = True
        elif self.user is not None:
            self.user.answer.body(data)

    def on_message_complete(self) -> None:
        if self._status >= 200:
            self._complete = True

    # ends

    def _finish(self) -> None:
        user, self.user = self.user, None
        self.n_served += 1
        keep = self._keep and not self._dirty and self.transport is not None and not self.transport.is_closing()
        if self._head_only:
            self._parser = httptools.HttpResponseParser(self)
        if user is not None:
            user.upstream_complete(keep=keep)

    def _give_up(self, why: str) -> None:
        user = self.user
        self.abort()
        if user is not None:
            user.upstream_lost(why)


def _unread(transport: asyncio.Transport | None) -> bytes:
    """What the engine said before it closed: a write that fails ends a connection before its last words are read."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.fileno() < 0:
        return b""
    said = bytearray()
    with socket.socket(fileno=os.dup(sock.fileno())) as same, contextlib.suppress(OSError):
        same.setblocking(False)
        while data := same.recv(_READ):
            said += data
    return bytes(said)


def _framing(headers: list[Header]) -> Framing:
    try:
        return framing_of(headers)
    except BadHeadError:
        return Framing(chunked=True)


def _says_close(headers: list[Header]) -> bool:
    return any(name.lower() == b"connection" and b"close" in value.lower() for name, value in headers)
