"""The engine of these benches: answers chats at once, or streams events at a rate, and has pools as far as a proxy can see.

Law: chats are answered in the protocol class, in one write each and without a task; all else is the fake engine of the tests.
Each event carries the clock at which it was written: `@` and twenty digits of monotonic nanoseconds. `max_tokens` says how many
events there are, `user` how many a second.
"""

from __future__ import annotations

import argparse
import random
import re
import socket
import time
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import Ask, Facts
from tests.fakes.fake_server import FakeEngineServer, QuietServer

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_REQ = re.compile(rb"\r\nx-polykv-req: (\d+)\r\n")
_N_EVENTS = re.compile(rb'"max_tokens": ?(\d+)')
_RATE = re.compile(rb'"user": ?"(\d+)"')
_STREAM = re.compile(rb'"stream": ?true')

_CHUNK = (
    b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"stub",'
    b'"choices":[{"index":0,"delta":{%b},"finish_reason":%b}]}'
)
_BODY = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"stub","choices":[{"index":0,"finish_reason":"stop",'
    b'"message":{"role":"assistant","content":"A parcel takes two days."}}],"usage":{"prompt_tokens":24,"completion_tokens":6,'
    b'"total_tokens":30},"timings":{"cache_n":0,"prompt_n":24,"prompt_ms":12.5,"predicted_n":6,"predicted_ms":30.1}}'
)
_FIELDS = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\nKeep-Alive: timeout=5, max=100\r\n"
_WHOLE = _FIELDS + b"%bContent-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n%b"
_PLAIN = _WHOLE % (b"", len(_BODY), _BODY)
_FACTS = b"x-polykv-slot: 0\r\nx-polykv-cached: 0\r\nx-polykv-shared: 0\r\nx-polykv-miss: token_mismatch\r\n"
_BOOKED = _WHOLE % (_FACTS, len(_BODY), _BODY)
_BEGIN = _FIELDS + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(data: bytes) -> bytes:
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


_FIRST = _event(_CHUNK % (b'"role":"assistant","content":""', b"null"))
_WORD = _event(_CHUNK % (b'"content":"@%b"' % (b"#" * 20), b"null")).replace(b"#" * 20, b"%020d")
_END = _event(_CHUNK % (b"", b'"stop"')) + _event(b"[DONE]") + b"0\r\n\r\n"


class StubProtocol(HttpToolsProtocol):
    """One connection. `engine` is whose events tell of requests that a proxy has numbered."""

    engine: FakeEngine
    _whole = b""
    _due = 0.0
    _step = 0.0
    _left = 0

    def data_received(self, data: bytes) -> None:
        if not self._whole and not data.startswith(CHAT):
            super().data_received(data)
            return
        self._whole += data
        head, found, body = self._whole.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if not found or length is None or len(body) < int(length[1]):
            return
        self._whole = b""
        self._unset_keepalive_if_required()
        if _STREAM.search(body) is not None:
            self._begin(body)
        elif b"x-polykv-req" in head and (number := _REQ.search(head)) is not None:
            self._tell(int(number[1]))
            self.transport.write(_BOOKED)
        else:
            self.transport.write(_PLAIN)

    def _tell(self, req: int) -> None:
        """What the engine's events say of a request that is over at once."""
        ask, facts = Ask(tokens=[1, 2, 3], n_predict=6, req=req), Facts(0, 3, 0, 0, None)
        self.engine.emit("launched", ask, 0)
        for kind in ("first_token", "finished", "released"):
            self.engine.emit(kind, ask, 0, facts, n_decoded=6, us_decode=6000, reason="limit")

    def _begin(self, body: bytes) -> None:
        n, rate = _N_EVENTS.search(body), _RATE.search(body)
        self._left = int(n[1]) if n else 16
        self._step = 1 / int(rate[1]) if rate else 0.0
        self.transport.write(_BEGIN + _FIRST)
        self._due = self.loop.time() + random.random() * self._step
        self.loop.call_at(self._due, self._next)

    def _next(self) -> None:
        """One event; events that are overdue follow each other at once."""
        while self._left and not self.transport.is_closing():
            self.transport.write(_WORD % time.monotonic_ns())
            self._left -= 1
            self._due += self._step
            if self._due > self.loop.time():
                self.loop.call_at(self._due, self._next)
                return
        self.transport.write(_END)


async def serve(uds: Path, port: int) -> None:
    """Until it is told to end."""
    engine = FakeEngine(n_slots=8, max_pools=8)
    engine.key = "bench"
    kind: Any = type("Bound", (StubProtocol,), {"engine": engine})
    near = socket.socket(socket.AF_UNIX)
    near.bind(str(uds))
    sockets = [near, socket.create_server(("127.0.0.1", port))]
    app = FakeEngineServer(engine, uds).app()
    config = uvicorn.Config(app, http=kind, ws="none", lifespan="off", log_config=None, timeout_keep_alive=600, backlog=1024)
    server = QuietServer(config)
    await server.serve(sockets=sockets)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("uds", type=Path)
    parser.add_argument("port", type=int)
    given = parser.parse_args()
    uvloop.run(serve(given.uds, given.port))
