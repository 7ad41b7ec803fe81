"""Event streams of ours: framing, heartbeats, and their end.

Law: a stream holds a place in what it tells and nothing else. Whoever reads slowly is not written to (the server waits for the
client), and goes on from what is newest. Streams end at once, with a last event, when the proxy is being stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from fastapi import Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event

from polykv_proxy.api.tps_texts import TpsTexts
from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.news import Event, News, Topic
from polykv_proxy.runtime.rows import StateView

HEARTBEAT_S = 15.0
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_CLOSING = format_sse_event(event="closing", data_str='{"reason":"the proxy is being stopped"}')


def stream(request: Request, news: News, chunks: AsyncIterator[bytes]) -> Response:
    """The answer that sends these chunks. ApiError 503 while the proxy is being stopped."""
    if news.closed:
        raise ApiError("draining", "The proxy is shutting down.", retry_after_s=5)
    if request.scope.get("polykv.head"):
        return Response(media_type="text/event-stream", headers=_HEADERS)
    return EventSourceResponse(chunks, headers=_HEADERS)


def last_seq(request: Request) -> int | None:
    """The number of the last event that the caller has seen; one that is none of ours counts as long gone."""
    text = request.headers.get("last-event-id", "").strip()
    if not text:
        return None
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else -1


class Speeds:
    """The speeds at a cadence. Readers of one cadence are told at the same moments, so that one look and one text serve all."""

    def __init__(self, news: News, glance: Callable[[], StateView]) -> None:
        self._news = news
        self._glance = glance
        self._seq = 0
        self._writer = TpsTexts()
        self._texts: dict[bool, bytes] = {}

    def now(self, *, running: bool) -> str:
        """What is now, as JSON."""
        return self._writer.text(self._glance(), running=running)

    def event(self, view: StateView, *, running: bool) -> bytes:
        """The event that tells of this view, made once."""
        if view.seq != self._seq:
            self._seq, self._texts = view.seq, {}
        if running not in self._texts:
            text = self._writer.text(view, running=running)
            self._texts[running] = format_sse_event(event="tps", data_str=text, id=str(view.seq))
        return self._texts[running]

    async def chunks(self, interval_s: float, seen: int | None, *, running: bool) -> AsyncIterator[bytes]:
        """What is now, unless it was `seen`; then what is at each moment of the cadence."""
        view = self._glance()
        if seen is None or seen < view.seq:
            yield self.event(view, running=running)
        now = asyncio.get_running_loop().time
        moment = 0
        while not self._news.closed:
            # counted, not looked up: a timer may be a little early, and its moment is over all the same
            moment = max(moment, int(now() / interval_s)) + 1
            while (left := moment * interval_s - now()) > HEARTBEAT_S and not self._news.closed:
                await self._news.rest(HEARTBEAT_S)
                yield KEEPALIVE_COMMENT
            await self._news.rest(left)
            if not self._news.closed:
                yield self.event(self._glance(), running=running)
        yield _CLOSING


async def happenings(news: News, at: int, topics: frozenset[Topic]) -> AsyncIterator[bytes]:
    """Events after number `at`. Where some of them are gone: one `resync`, then from now on."""
    while True:
        events = news.after(at)
        if events is None:
            at = news.skip()
            yield format_sse_event(event="resync", data_str=f'{{"seq":{at}}}', id=str(at))
        elif events:
            at = events[-1].seq
            told = b"".join(_happening(event) for event in events if event.topic in topics)
            if told:
                yield told
        elif news.closed:
            yield _CLOSING
            return
        elif not await news.wait(at, HEARTBEAT_S):
            yield KEEPALIVE_COMMENT


def _happening(event: Event) -> bytes:
    return format_sse_event(event=event.topic.value, data_str=event.text, id=str(event.seq))
