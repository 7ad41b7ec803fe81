"""`/metrics`: the engine's page and ours as one.

Law: on the engine's own path and behind its own key. What is on the page is the business of observability/.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from polykv_proxy.api.context import ApiContext, engine_keys_of
from polykv_proxy.observability.exposition import form_of, takes_gzip
from polykv_proxy.observability.page import MetricsPage

_UNAUTHORIZED = b'{"error":{"message":"Invalid API Key","type":"authentication_error","code":401}}'
"""The engine's own words."""


def metrics_route(context: ApiContext, page: MetricsPage) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.get(context.api_prefix + "/metrics")
    async def metrics(request: Request) -> Response:
        if not context.keys.accepts_any(engine_keys_of(request.scope["headers"])):
            return Response(_UNAUTHORIZED, 401, media_type="application/json; charset=utf-8")
        form = form_of(request.headers.get("accept", ""))
        made = await page.read(form)
        headers = {"content-type": form.value, "cache-control": "no-store", "vary": "accept, accept-encoding"}
        if made.started is not None:
            headers["process-start-time-unix"] = made.started
        if takes_gzip(request.headers.get("accept-encoding", "")):
            return Response(made.compressed, headers={**headers, "content-encoding": "gzip"})
        return Response(made.body, headers=headers)

    return router
