"""`/polykv/savings` and `/polykv/health`.

Law: facts only. Health always answers; its details (last lines of the engine's output, names of pools) are for holders of a key.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from polykv_proxy.api.context import ApiContext, key_of
from polykv_proxy.api.pages import savings_page
from polykv_proxy.api.queries import whole
from polykv_proxy.runtime.admission_rows import summary
from polykv_proxy.runtime.savings import DAYS

DAYS_SHOWN = 30

_DETAILS = frozenset({"last_lines", "command", "pid"})


def telemetry_routes(context: ApiContext) -> APIRouter:
    """The routes."""
    router = APIRouter()
    runtime = context.runtime

    @router.get("/polykv/savings")
    async def savings(request: Request) -> Response:
        days = whole(request, "days", at_least=1)
        found = await runtime.hub.telemetry.savings.since(min(days or DAYS_SHOWN, DAYS))
        return JSONResponse(savings_page(runtime.glance.now(), found))

    return router


def health_route(context: ApiContext) -> APIRouter:
    """`/polykv/health`: open to everyone."""
    router = APIRouter()
    hub = context.runtime.hub

    @router.get("/polykv/health")
    async def health(request: Request) -> Response:
        facts = dict(context.health())
        declared = context.runtime.declared.facts()
        kv_disk = context.runtime.vault.facts()
        if not context.keys.accepts(key_of(request)):
            facts = {key: value for key, value in facts.items() if key not in _DETAILS}
            declared = {key: value for key, value in declared.items() if key != "pools"} if declared is not None else None
            kv_disk = {**kv_disk, "paused": kv_disk["paused"] is not None}
        more = {"kv_disk": kv_disk, "gpu_share": _gpu_share(), "admission": summary(context.runtime.admission)}
        return JSONResponse({**facts, "pools": _pools(), "declared": declared, **more})

    def _gpu_share() -> dict[str, object]:
        """Numbers only: names of peers are for holders of a key."""
        row = hub.telemetry.peers.look()
        facts = {"enabled": row.enabled, "why": row.why, "gpu_key": row.gpu_key, "n_peers": len(row.peers)}
        return {**facts, "weight": row.me.weight if row.me else None, "share_pct": row.me.share_pct if row.me else None}

    def _pools() -> dict[str, object]:
        if hub.absent is not None:
            return {"state": "off", "reason": hub.absent, "remedy": hub.remedy}
        if hub.hello is None or not hub.linked:
            return {
                "state": "unknown",
                "reason": "the engine has not answered yet" if hub.hello is None else "the engine does not answer",
            }
        on = hub.hello.prefix_sharing != "none" and hub.hello.max_pools > 0
        return {
            "state": "on" if on else "off",
            "reason": hub.hello.prefix_sharing_why,
            "prefix_sharing": hub.hello.prefix_sharing,
            "max_pools": hub.hello.max_pools,
            "pools_price_bytes": hub.hello.pools_price_bytes,
            "boot_id": hub.hello.boot_id,
            "phase": hub.hello.phase,
            "engine": hub.hello.model_dump(exclude={"boot_id", "phase"}),
        }

    return router
