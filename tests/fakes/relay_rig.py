"""A relay in a thread of its own, on uvloop and a free port, in front of any address; and a raw client for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from polykv_proxy.api.relay import Relay, RelayLimits, RelayProtocol, Routes, UpstreamPool
from polykv_proxy.ports import EngineAddress, RequestGate
from tests.fakes.fake_server import QuietServer


class RelayRig:
    """Serves from entry to exit. `on_loop` runs a function on the relay's loop and returns its result."""

    def __init__(
        self,
        address: EngineAddress | None,
        *,
        gate: RequestGate | None = None,
        pool: Callable[[], UpstreamPool] = UpstreamPool,
        routes: Routes | None = None,
        limits: RelayLimits | None = None,
    ) -> None:
        self._address = address
        self._gate = gate
        self._make_pool = pool
        self._routes = routes
        self._limits = limits
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), daemon=True)
        self.port = 0
        self.loop_errors: list[dict[str, Any]] = []

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(lambda _loop, context: self.loop_errors.append(context))
        self.pool = self._make_pool()
        self.relay = Relay(self.pool, routes=self._routes, limits=self._limits)
        self.relay.gate = self._gate
        if self._address is not None:
            self.pool.open(self._address)
        app = FastAPI()

        @app.api_route("/polykv/ping", methods=["GET", "POST"])
        async def ping() -> dict[str, bool]:
            return {"pong": True}

        sock = socket.create_server(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        http: Any = functools.partial(RelayProtocol, relay=self.relay)
        config = uvicorn.Config(app, http=http, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False)
        self._server = QuietServer(config)
        asyncio.get_running_loop().call_soon(self._ready.set)
        await self._server.serve(sockets=[sock])
        self.pool.drop_idle()

    def __enter__(self) -> RelayRig:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *exc: object) -> None:
        self.on_loop(lambda: self.relay.cut("draining", "test over"))
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert not self.loop_errors, self.loop_errors

    def on_loop(self, call: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def turn(self) -> None:
        """What was sent so far has been read."""
        for _ in range(2):
            self.on_loop(lambda: None)

    def connect(self) -> Client:
        return Client(self.port)

    def send(self, data: bytes) -> Reply:
        """One request on a connection of its own."""
        with self.connect() as client:
            client.send(data)
            return client.reply(head_only=data.startswith(b"HEAD "))


class Reply:
    """A parsed reply: `raw_body` keeps chunk framing, `body` does not."""

    def __init__(self, head: bytes, body: bytes, raw_body: bytes, *, complete: bool) -> None:
        self.head = head
        self.body = body
        self.raw_body = raw_body
        self.complete = complete

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])

    def header(self, name: bytes) -> list[bytes]:
        lines = self.head.split(b"\r\n")[1:]
        return [line.split(b":", 1)[1].strip() for line in lines if line.lower().startswith(name.lower() + b":")]


class Client:
    """A raw client connection."""

    def __init__(self, port: int, *, rcvbuf: int | None = None) -> None:
        self.sock = socket.socket()
        if rcvbuf:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        self.sock.settimeout(30)
        self.sock.connect(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.data = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def more(self) -> bool:
        data = self.sock.recv(65536)
        self.data += data
        return bool(data)

    def until(self, mark: bytes) -> bytes:
        while mark not in self.data:
            if not self.more():
                raise EOFError(self.data)
        found, self.data = self.data.split(mark, 1)
        return found + mark

    def rest(self) -> bytes:
        """Everything until the peer closes."""
        with contextlib.suppress(ConnectionResetError):
            while self.more():
                pass
        data, self.data = self.data, b""
        return data

    def reply(self, *, head_only: bool = False) -> Reply:
        head = self.until(b"\r\n\r\n")
        lower = head.lower()
        status = int(head.split(b" ", 2)[1])
        if head_only or status in (204, 304):
            return Reply(head, b"", b"", complete=True)
        if b"\r\ntransfer-encoding: chunked\r\n" in lower:
            return self._chunked(head)
        for line in lower.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return self._sized(head, int(line.split(b":")[1]))
        body = self.rest()
        return Reply(head, body, body, complete=True)

    def _sized(self, head: bytes, n: int) -> Reply:
        while len(self.data) < n and self.more():
            pass
        body, self.data = self.data[:n], self.data[n:]
        return Reply(head, body, body, complete=len(body) == n)

    def _chunked(self, head: bytes) -> Reply:
        body, raw = b"", b""
        while True:
            try:
                size = self.until(b"\r\n")
            except EOFError:
                return Reply(head, body, raw, complete=False)
            n = int(size, 16) + 2
            while len(self.data) < n and self.more():
                pass
            data, self.data = self.data[:n], self.data[n:]
            raw += size + data
            if len(data) < n or n == 2:
                return Reply(head, body, raw, complete=len(data) == n)
            body += data[:-2]


def request(method: bytes = b"GET", target: bytes = b"/slots", body: bytes | None = None, extra: bytes = b"") -> bytes:
    """A plain request with a length where there is a body."""
    length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
    return b"%b %b HTTP/1.1\r\nHost: test\r\n%b%b\r\n%b" % (method, target, extra, length, body or b"")
