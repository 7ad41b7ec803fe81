"""A scripted engine: a raw-socket HTTP server, on TCP or a unix socket, that does what a script says and records what it saw.

A script is a list of steps: bytes are written, a float is waited, DROP resets the connection, CLOSE closes it, HANG reads until
the peer leaves, STALL waits for that without reading, ENDLESS and FLOOD write until the peer leaves. `Stub.requests` holds the
exact bytes of each request, in order of arrival; `peer_closed` is set when the stub saw the peer of that request leave.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class Do(Enum):
    DROP = "drop"
    CLOSE = "close"
    HANG = "hang"
    ENDLESS = "endless"
    FLOOD = "flood"
    STALL = "stall"


Step = bytes | float | Do
Script = Sequence[Step]


@dataclass
class Seen:
    """One request as it came."""

    head: bytes
    body: bytes
    raw_body: bytes
    connection: int
    peer_closed: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)

    @property
    def target(self) -> bytes:
        return self.head.split(b" ", 2)[1]

    @property
    def method(self) -> bytes:
        return self.head.split(b" ", 1)[0]

    def header(self, name: bytes) -> list[bytes]:
        lines = self.head.split(b"\r\n")[1:]
        return [line.split(b":", 1)[1].strip() for line in lines if line.lower().startswith(name.lower() + b":")]


class Stub:
    """`script(seen)` returns the steps for one request. `keep_idle_s`: idle connections are closed after this long."""

    def __init__(
        self,
        script: Callable[[Seen], Script],
        *,
        path: Path | None = None,
        keep_idle_s: float = 5.0,
        close_on_reuse: bool = False,
        read_body: bool = True,
    ) -> None:
        self.script = script
        self.requests: list[Seen] = []
        self.n_connections = 0
        self.arrived = threading.Condition()
        self._path = path
        self._keep_idle_s = keep_idle_s
        self._close_on_reuse = close_on_reuse
        self._read_body = read_body
        self._open: set[socket.socket] = set()
        self._stopping = False
        self._listen()

    def _listen(self) -> None:
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._server.bind(str(self._path))
        else:
            self._server = socket.create_server(("127.0.0.1", 0))
        self._server.listen(128)
        self.port = 0 if self._path is not None else self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for conn in list(self._open):
            with contextlib.suppress(OSError):
                conn.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    def wait_requests(self, n: int, timeout: float = 10) -> Seen:
        """Block until `n` requests have arrived; returns the n-th."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.requests) >= n, timeout), f"{len(self.requests)} of {n} requests came"
            return self.requests[n - 1]

    def _accept(self) -> None:
        while not self._stopping:
            try:
                conn, _ = self._server.accept()
            except OSError:
                return
            self.n_connections += 1
            threading.Thread(target=self._serve, args=(conn, self.n_connections), daemon=True).start()

    def _serve(self, conn: socket.socket, number: int) -> None:
        self._open.add(conn)
        try:
            with conn:
                reader = _Reader(conn)
                first = True
                while self._one(conn, reader, number, first):
                    first = False
        except (OSError, EOFError):
            pass
        finally:
            self._open.discard(conn)

    def _one(self, conn: socket.socket, reader: _Reader, number: int, first: bool) -> bool:
        conn.settimeout(None if first else self._keep_idle_s)
        head = reader.until(b"\r\n\r\n")
        conn.settimeout(30)
        if not first and self._close_on_reuse:
            return False
        if b"\r\nexpect: 100-continue" in head.lower():
            conn.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body, raw = reader.body(head) if self._read_body else (b"", b"")
        seen = Seen(head, body, raw, number)
        with self.arrived:
            self.requests.append(seen)
            self.arrived.notify_all()
        try:
            return self._play(conn, seen)
        except OSError:
            seen.peer_closed.set()
            raise
        finally:
            seen.finished.set()

    def _play(self, conn: socket.socket, seen: Seen) -> bool:
        for step in self.script(seen):
            if isinstance(step, bytes):
                conn.sendall(step)
            elif isinstance(step, float):
                if _peer_left(conn, step):
                    seen.peer_closed.set()
                    return False
            elif step is Do.DROP:
                conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            elif step is Do.CLOSE:
                conn.close()  # before the request counts as finished
                return False
            elif step is Do.STALL:
                _wait_hang_up(conn, 60)
                seen.peer_closed.set()
                return False
            elif step is Do.HANG:
                _peer_left(conn, 60)
                seen.peer_closed.set()
                return False
            else:
                self._endless(conn, b"data: x\n\n" if step is Do.ENDLESS else b"x" * 65536, 0.002 if step is Do.ENDLESS else 0.0)
        return True

    def _endless(self, conn: socket.socket, data: bytes, pause: float) -> None:
        while not self._stopping:
            _, writable, _ = select.select([], [conn], [], 0.05)
            if writable:
                conn.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    conn.send(b"%x\r\n%b\r\n" % (len(data), data))
                conn.setblocking(True)
            if _peer_left(conn, pause):
                raise BrokenPipeError


def _peer_left(conn: socket.socket, wait: float) -> bool:
    """Wait at most `wait` seconds for the peer to close."""
    end = time.monotonic() + wait
    while True:
        readable, _, _ = select.select([conn], [], [], max(0.0, end - time.monotonic()))
        if readable:
            return not conn.recv(65536)
        if time.monotonic() >= end:
            return False


def _wait_hang_up(conn: socket.socket, seconds: float) -> None:
    """Wait for the peer to close, reading nothing."""
    poll = select.poll()
    poll.register(conn, select.POLLRDHUP | select.POLLHUP)
    poll.poll(int(seconds * 1000))


class _Reader:
    def __init__(self, conn: socket.socket) -> None:
        self._conn = conn
        self._data = b""

    def _more(self) -> None:
        data = self._conn.recv(65536)
        if not data:
            raise EOFError
        self._data += data

    def until(self, mark: bytes) -> bytes:
        while mark not in self._data:
            self._more()
        head, self._data = self._data.split(mark, 1)
        return head + mark

    def take(self, n: int) -> bytes:
        while len(self._data) < n:
            self._more()
        taken, self._data = self._data[:n], self._data[n:]
        return taken

    def body(self, head: bytes) -> tuple[bytes, bytes]:
        """Decoded body and the bytes as they came."""
        lower = head.lower()
        if b"\r\ntransfer-encoding: chunked" in lower:
            return self._chunked()
        for line in lower.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                data = self.take(int(line.split(b":")[1]))
                return data, data
        return b"", b""

    def _chunked(self) -> tuple[bytes, bytes]:
        body, raw = b"", b""
        while True:
            size = self.until(b"\r\n")
            data = self.take(int(size, 16) + 2)
            raw += size + data
            if int(size, 16) == 0:
                return body, raw
            body += data[:-2]


def reply(body: bytes = b"{}", *, status: bytes = b"200 OK", kind: bytes = b"application/json", extra: bytes = b"") -> list[Step]:
    """A whole reply with a length."""
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (status, kind, len(body), extra)
    return [head + body]


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
