"""One way to call either client, and transports that break on purpose.

Law: a test that takes `Verbs` holds for both clients. The sync client works in a thread, the proxy in the test's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx

from opencoti_langgraph import AsyncPoolClient, PoolClient


class Verbs:
    """Both clients behind coroutines."""

    def __init__(self, client: PoolClient | AsyncPoolClient) -> None:
        self.client = client

    async def __call__(self, verb: str, *args: object, **kwargs: object) -> Any:
        """One verb."""
        bound = getattr(self.client, verb)
        if isinstance(self.client, AsyncPoolClient):
            return await bound(*args, **kwargs)
        return await asyncio.to_thread(bound, *args, **kwargs)

    async def stream(self, verb: str, *args: object, **kwargs: object) -> AsyncIterator[Any]:
        """The items of a stream, as they come."""
        items = getattr(self.client, verb)(*args, **kwargs)
        if isinstance(self.client, AsyncPoolClient):
            try:
                async for item in items:
                    yield item
            finally:
                await items.aclose()
            return
        try:
            while (item := await asyncio.to_thread(next, items, None)) is not None:
                yield item
        finally:
            await asyncio.to_thread(items.close)


Fault = Callable[[httpx.Request, int], str | None]
"""What goes wrong with the n-th request: `before` it is sent, `after` the answer, `stream` after one event of it; None: nothing."""


class Cut(httpx.SyncByteStream, httpx.AsyncByteStream):
    """An event stream that breaks after its first event."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.stream:
            yield piece[: piece.index(b"\n\n") + 2]
            break
        raise httpx.ReadError("cut on purpose")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self.stream:
            yield piece[: piece.index(b"\n\n") + 2]
            break
        raise httpx.ReadError("cut on purpose")

    def close(self) -> None:
        self.stream.close()

    async def aclose(self) -> None:
        await self.stream.aclose()


class Breaking(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A real transport with faults."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.seen = fault, list[httpx.Request]()
        self.sync, self.asynchronous = httpx.HTTPTransport(), httpx.AsyncHTTPTransport()

    def _what(self, request: httpx.Request) -> str | None:
        self.seen.append(request)
        what = self.fault(request, len(self.seen))
        if what == "before":
            raise httpx.ConnectError("refused on purpose")
        return what

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        what = self._what(request)
        reply = self.sync.handle_request(request)
        if what == "after":
            reply.read()
            reply.close()
            raise httpx.ReadError("lost on purpose")
        return httpx.Response(reply.status_code, headers=reply.headers, stream=Cut(reply.stream)) if what == "stream" else reply

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        what = self._what(request)
        reply = await self.asynchronous.handle_async_request(request)
        if what == "after":
            await reply.aread()
            await reply.aclose()
            raise httpx.ReadError("lost on purpose")
        return httpx.Response(reply.status_code, headers=reply.headers, stream=Cut(reply.stream)) if what == "stream" else reply

    def close(self) -> None:
        self.sync.close()

    async def aclose(self) -> None:
        await self.asynchronous.aclose()


async def no_wait(_seconds: float) -> None:
    """A pause that takes no time."""


def verbs_of(kind: str, url: str, fault: Fault | None = None) -> tuple[Verbs, Breaking]:
    """A client of that kind, without pauses, and its transport."""
    transport = Breaking(fault or (lambda request, n: None))
    if kind == "async":
        return Verbs(AsyncPoolClient(url, transport=lambda: transport, sleep=no_wait)), transport
    http = httpx.Client(base_url=url, transport=transport, timeout=None)
    return Verbs(PoolClient(http_client=http, sleep=lambda seconds: None)), transport


async def closed(verbs: Verbs, transport: Breaking) -> None:
    """Leave no connection behind."""
    if isinstance(verbs.client, AsyncPoolClient):
        await verbs.client.aclose()
    else:
        verbs.client.close()
        transport.close()
        await transport.aclose()
        await asyncio.to_thread(verbs.client._http.close)
