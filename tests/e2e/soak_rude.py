"""What badly behaved clients do, each on a connection of its own: leave in the middle, send too much, send what is no HTTP.

Law: returns the status of the answer; a request that should have had one and has none, or another one, is an AssertionError.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

CHAT = "/v1/chat/completions"
WORDS = (
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "falcon",
    "garnet",
    "harbour",
    "island",
    "jasper",
    "kernel",
    "lemon",
    "marble",
)
HEAD_LIMIT = 64 * 1024
POINTS = ("at once", "at the head", "in the body")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def ask(body: bytes, extra: str = "") -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


NO_HTTP: list[tuple[bytes, set[int]]] = [
    (b"GARBAGE\r\n\r\n", {400}),
    (b"GET /slots HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
    (f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n".encode(), {400}),
    (f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: -1\r\n\r\n".encode(), {400}),
    (b"GET /slots HTTP/1.1\r\nHost: t\r\nX-Long: " + b"x" * (HEAD_LIMIT + 1000) + b"\r\n\r\n", {431}),
    (ask(b"{not json"), {400, 500}),
    (ask(b'{"messages": 7}'), {400, 500}),
    (ask(b'{"messages":[{"role":"user","content":"x"}],"pool_id":"nobody_here"}'), {404}),
    (ask(b'{"messages":[{"role":"user","content":"x"}],"pool_id":{}}'), {400}),
    (ask(b'{"messages":[{"role":"user","content":"x"}],"pool_id":"a"}', "X-Pool-Id: b\r\n"), {400}),
]


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[Streams]:
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def status_of(reader: asyncio.StreamReader) -> int:
    line = await reader.readline()
    if not line.startswith(b"HTTP/1.1 "):
        raise AssertionError(f"no answer but {line!r}")
    return int(line.split(b" ", 2)[1])


async def leave(url: str, body: dict[str, Any], dice: random.Random) -> None:
    """Ask, and go away at one of the POINTS, by close or by reset."""
    async with connection(url) as (reader, writer):
        writer.write(ask(json.dumps(body).encode()))
        await writer.drain()
        point = dice.choice(POINTS)
        if point != "at once":
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
        if point == "in the body":
            await reader.readuntil(b"data: ")
        if dice.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


async def oversized(url: str, body_limit: int, dice: random.Random) -> int:
    """A body beyond the limit, or a prompt beyond any context: 413, or the engine's own 400."""
    if dice.random() < 0.5:
        body, expected = b'{"messages":[{"role":"user","content":"' + b"x" * body_limit + b'"}]}', 413
    else:
        text = " ".join(dice.choices(WORDS, k=9000))
        body, expected = json.dumps({"messages": [{"role": "user", "content": text}]}).encode(), 400
    async with connection(url) as (reader, writer):
        with suppress(ConnectionError):  # it need not be read to the end
            writer.write(ask(body))
            await writer.drain()
        status = await status_of(reader)
    if status != expected:
        raise AssertionError(f"{len(body)} bytes: status {status}, not {expected}")
    return status


async def malformed(url: str, dice: random.Random) -> int:
    """Something that is no HTTP, or no request that can be served."""
    sent, expected = dice.choice(NO_HTTP)
    async with connection(url) as (reader, writer):
        writer.write(sent)
        status = await status_of(reader)
    if status not in expected:
        raise AssertionError(f"{sent[:80]!r}: status {status}, not one of {expected}")
    return status
