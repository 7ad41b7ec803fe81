"""The application for `/polykv/*` and `/gpu/*`: routes, keys, errors. The relay never passes through here.

Law: made from an ApiContext; holds no state of its own.
"""

from __future__ import annotations

from fastapi import Depends, FastAPI, Request

from polykv_proxy.api.admission_routes import admission_routes
from polykv_proxy.api.browsers import Browsers
from polykv_proxy.api.capacity_routes import capacity_routes
from polykv_proxy.api.context import ApiContext, require_key
from polykv_proxy.api.document import OPERATIONS, document_route
from polykv_proxy.api.error_handlers import install
from polykv_proxy.api.gpu_routes import gpu_routes
from polykv_proxy.api.lifetime_routes import lifetime_routes
from polykv_proxy.api.line_end import LineEnd
from polykv_proxy.api.look_routes import look_routes
from polykv_proxy.api.methods import Methods
from polykv_proxy.api.metrics_route import metrics_route
from polykv_proxy.api.pool_routes import pool_routes
from polykv_proxy.api.queries import check_query
from polykv_proxy.api.session_routes import session_routes
from polykv_proxy.api.stream_routes import stream_routes
from polykv_proxy.api.telemetry_routes import health_route, telemetry_routes
from polykv_proxy.api.verify_routes import verify_routes


def build_app(context: ApiContext) -> FastAPI:
    """The ASGI application. Starting and stopping the runtime is the caller's business."""
    app = FastAPI(title="polykv-proxy", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    install(app)
    app.add_middleware(Methods, routes=app.router.routes)
    app.add_middleware(Browsers, names=context.hosts)
    app.add_middleware(LineEnd)

    async def keyed(request: Request) -> None:
        require_key(context, request)

    async def pooled(request: Request) -> None:
        context.runtime.hub.require_pools()
        check_query(request, OPERATIONS[request.method, request.scope["route"].path_format].query)

    guard = [Depends(keyed), Depends(pooled)]
    app.include_router(health_route(context))
    app.include_router(document_route(), dependencies=[Depends(keyed)])
    if context.metrics is not None:
        app.include_router(metrics_route(context, context.metrics))
    for routes in (
        pool_routes,
        lifetime_routes,
        verify_routes,
        look_routes,
        session_routes,
        telemetry_routes,
        admission_routes,
        capacity_routes,
        stream_routes,
        gpu_routes,
    ):
        app.include_router(routes(context), dependencies=guard)
    return app
