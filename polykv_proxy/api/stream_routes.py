"""`/polykv/tps` and `/polykv/events`.

Law: parse, then hand over to streams.py; the engine is asked nothing.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from polykv_proxy.api.context import ApiContext
from polykv_proxy.api.queries import flag, whole
from polykv_proxy.api.streams import Speeds, happenings, last_seq, stream
from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.news import Topic

INTERVAL_MS = 500
SHORTEST_MS = 100
LONGEST_MS = 60_000


def stream_routes(context: ApiContext) -> APIRouter:
    """The routes."""
    router = APIRouter()
    runtime = context.runtime
    news = runtime.hub.telemetry.news
    speeds = Speeds(news, runtime.glance.now)

    @router.get("/polykv/tps")
    async def tps(request: Request) -> Response:
        running = flag(request, "running", default=False)
        interval_ms = whole(request, "interval_ms", at_least=SHORTEST_MS, at_most=LONGEST_MS) or INTERVAL_MS
        if flag(request, "once", default=False):
            return Response(speeds.now(running=running), media_type="application/json")
        return stream(request, news, speeds.chunks(interval_ms / 1000, last_seq(request), running=running))

    @router.get("/polykv/events")
    async def events(request: Request) -> Response:
        seen = last_seq(request)
        return stream(request, news, happenings(news, news.seq if seen is None else seen, _topics(request)))

    return router


def _topics(request: Request) -> frozenset[Topic]:
    """All, or those that `?topics=` names, once or more than once."""
    texts = request.query_params.getlist("topics")
    if not texts:
        return frozenset(Topic)
    known = {topic.value: topic for topic in Topic}
    named = [name.strip() for text in texts for name in text.split(",")]
    for name in named:
        if name not in known:
            raise ApiError("invalid_request", f"topics are {', '.join(known)}, not {name!r:.40}", param="topics")
    return frozenset(known[name] for name in named)
