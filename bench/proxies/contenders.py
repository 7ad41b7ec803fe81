"""Relays as they could be built: an ASGI pump on several servers, loops and clients, and the protocol-level one on two loops.

Law: each does the least that a relay must (bodies and events as they come, hop-by-hop fields dropped), so what is measured is
the libraries.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import httpx2
import uvicorn

from polykv_proxy.api.relay import Relay, RelayProtocol, UpstreamPool
from polykv_proxy.api.relay.answer import Answer
from polykv_proxy.api.relay.heads import Framing, request_head
from polykv_proxy.api.relay.reply import ReplyHead
from polykv_proxy.ports import EngineAddress

Headers = list[tuple[bytes, bytes]]
Reply = tuple[int, Headers, AsyncIterator[bytes]]
Send = Callable[[str, bytes, Headers, bytes], Any]
_DROPPED = {b"connection", b"keep-alive", b"transfer-encoding", b"host"}


def _kept(headers: Any) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in _DROPPED]


def by_httpx(library: Any, uds: str) -> Send:
    """httpx, or its successor."""
    limits = library.Limits(max_connections=None, max_keepalive_connections=512)
    client = library.AsyncClient(transport=library.AsyncHTTPTransport(uds=uds, limits=limits), timeout=None)

    @asynccontextmanager
    async def send(method: str, target: bytes, headers: Headers, body: bytes) -> AsyncIterator[Reply]:
        async with client.stream(method, "http://engine" + target.decode(), headers=headers, content=body) as reply:
            yield reply.status_code, _kept(reply.headers.raw), reply.aiter_raw()

    return send


def by_aiohttp(uds: str) -> Send:
    """aiohttp."""
    sessions: list[aiohttp.ClientSession] = []

    @asynccontextmanager
    async def send(method: str, target: bytes, headers: Headers, body: bytes) -> AsyncIterator[Reply]:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.UnixConnector(uds, limit=0), auto_decompress=False))
        named = [(name.decode(), value.decode()) for name, value in headers]
        async with sessions[0].request(method, "http://engine" + target.decode(), headers=named, data=body) as reply:
            yield reply.status, _kept(reply.raw_headers), reply.content.iter_any()

    return send


class _Waiting:
    """Ours, with a queue in place of an exchange."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[ReplyHead | bytes | None] = asyncio.Queue()
        self.answer: Answer = self  # type: ignore[assignment]
        self.upstream_head = self.body = self.came.put_nowait

    def flush(self) -> None: ...
    def upstream_writable(self, ok: bool) -> None: ...
    def upstream_lost(self, why: str) -> None:
        self.came.put_nowait(None)

    def upstream_complete(self, *, keep: bool) -> None:
        self.kept = keep
        self.came.put_nowait(None)


def by_ours(uds: str) -> Send:
    """The product's own connections to the engine."""
    pool = UpstreamPool()
    pool.open(EngineAddress(uds=uds))

    @asynccontextmanager
    async def send(method: str, target: bytes, headers: Headers, body: bytes) -> AsyncIterator[Reply]:
        upstream = pool.take(repeatable=False) or await pool.connect()
        user = _Waiting()
        head = request_head(method.encode(), target, headers, Framing(len(body)))
        upstream.begin(user, head + body, head_only=False)
        begun = await user.came.get()
        assert isinstance(begun, ReplyHead)

        async def parts() -> AsyncIterator[bytes]:
            while isinstance(part := await user.came.get(), bytes):
                yield part

        yield begun.status, _kept(begun.headers), parts()
        pool.release(upstream) if user.kept else upstream.abort()

    return send


def application(send_on: Send) -> Callable[..., Awaitable[None]]:
    """The ASGI pump."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while (message := await receive()).get("more_body"):
            body += message.get("body", b"")
        body += message.get("body", b"")
        async with send_on(scope["method"], scope["raw_path"], _kept(scope["headers"]), body) as (status, headers, parts):
            await send({"type": "http.response.start", "status": status, "headers": headers})
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    return app


def app_of_environment() -> Callable[..., Awaitable[None]]:
    """For servers that import what they serve."""
    makers = {
        "httpx": functools.partial(by_httpx, httpx),
        "httpx2": functools.partial(by_httpx, httpx2),
        "aiohttp": by_aiohttp,
        "ours": by_ours,
    }
    return application(makers[os.environ["BENCH_CLIENT"]](os.environ["BENCH_UDS"]))


def serve(server: str, loop: Any, port: int) -> None:
    """Until it is told to end. `server`: granian, h11 or httptools (uvicorn's parsers), or protocol: the relay below ASGI."""
    if server == "granian":
        from granian import Granian  # noqa: PLC0415 installed for this bench alone

        at = {"address": "127.0.0.1", "port": port, "interface": "asginl", "loop": loop, "factory": True, "log_enabled": False}
        Granian("bench.proxies.contenders:app_of_environment", **at).serve()
        return
    http: Any = server
    if server == "protocol":
        pool = UpstreamPool()
        pool.open(EngineAddress(uds=os.environ["BENCH_UDS"]))
        http = functools.partial(RelayProtocol, relay=Relay(pool))
    uvicorn.run(
        app_of_environment(), host="127.0.0.1", port=port, http=http, loop=loop, ws="none", lifespan="off", log_level="error"
    )


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
