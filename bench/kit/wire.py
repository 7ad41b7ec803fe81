"""One timed HTTP request over a bare socket, with the arrival time of every streamed event.

Law: the clock starts when the request is handed to the kernel (the connection stands by then) and nothing is parsed or printed
before it stops; a client library would add milliseconds that both sides share, and so flatter every ratio.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools

TIMEOUT_S = 600.0
_EVENT = b"data: {"


@dataclass
class Exchange:
    """A finished request. Times are seconds since it was sent; `arrivals` has one for each `data:` event."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    arrivals: list[float] = field(default_factory=list)
    total_s: float = 0.0
    began: float = 0.0
    """When it was sent, by `time.perf_counter`."""

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON events, in order."""
        lines = (line for line in self.body.decode().split("\n") if line.startswith("data: {"))
        return [json.loads(line.removeprefix("data: ")) for line in lines]


class Wire:
    """Where requests go: a unix socket, or the host and port of an http URL."""

    def __init__(self, address: Path | str) -> None:
        self._unix = address if isinstance(address, Path) else None
        parts = urlsplit(str(address))
        self._host = (parts.hostname or "", parts.port or 80)

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Exchange:
        """RuntimeError with the answer when it is not a 2xx."""
        payload = json.dumps(body, separators=(",", ":")).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: engine",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
            "Connection: close",
        ]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        request = "\r\n".join([*lines, "", ""]).encode() + payload
        with self._connect() as connection:
            reader = _Reader()
            begin = time.perf_counter()
            connection.sendall(request)
            while not reader.complete and (data := connection.recv(1 << 18)):
                reader.feed(data, time.perf_counter() - begin)
        done = reader.finish()
        done.began = begin
        if not reader.complete or done.status // 100 != 2:
            raise RuntimeError(f"POST {path} was answered by {done.status}: {done.body[:400].decode(errors='replace')}")
        if b'\ndata: {"error"' in b"\n" + done.body or done.body.startswith(b"error: "):
            raise RuntimeError(f"POST {path} ended with an error: {done.body[-400:].decode(errors='replace')}")
        return done

    def _connect(self) -> socket.socket:
        if self._unix is not None:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(TIMEOUT_S)
            connection.connect(str(self._unix))
            return connection
        connection = socket.create_connection(self._host, TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


class _Reader:
    """Collects an answer; callbacks of httptools."""

    def __init__(self) -> None:
        self.complete = False
        self._answer = Exchange()
        self._parts: list[bytes] = []
        self._tail = b""
        self._now = 0.0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes, now: float) -> None:
        self._now = now
        self._parser.feed_data(data)

    def finish(self) -> Exchange:
        self._answer.status = self._parser.get_status_code()
        self._answer.body = b"".join(self._parts)
        self._answer.total_s = self._now
        return self._answer

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode().lower()] = value.decode()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        joined = self._tail + data
        self._answer.arrivals += [self._now] * joined.count(_EVENT)
        self._tail = joined[-len(_EVENT) + 1 :]

    def on_message_complete(self) -> None:
        self.complete = True
