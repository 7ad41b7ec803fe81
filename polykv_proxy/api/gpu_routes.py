"""`/gpu/peers` and `/gpu/weight`: who shares the engine's device, and how much of it ours gets.

Law: peers are read from the registry, also while the engine is away; a weight is the engine's to set.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from polykv_proxy.api.context import ApiContext, read_body, require_admin
from polykv_proxy.api.pages import peers_page
from polykv_proxy.api.wire import SetWeight, parse
from polykv_proxy.errors import EngineError
from polykv_proxy.runtime.answers import api_error


def gpu_routes(context: ApiContext) -> APIRouter:
    """The routes."""
    router = APIRouter()
    hub = context.runtime.hub

    @router.get("/gpu/peers")
    async def peers() -> Response:
        return JSONResponse(peers_page(hub.telemetry.peers.look()))

    @router.post("/gpu/weight")
    async def weight(request: Request) -> Response:
        require_admin(context, request, "weight")
        order = parse(SetWeight, await read_body(context, request))
        hub.require_engine()
        try:
            share = await hub.client.set_gpu_weight(order.weight)
        except EngineError as error:
            raise api_error(error) from error
        return JSONResponse({"weight": share.weight, "gpu_key": share.gpu_key, "slot": share.slot})

    return router
