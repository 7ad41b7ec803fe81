"""`/polykv/admission`, of one pool too, and `/polykv/decisions`.

Law: parse, call the runtime, render; no decision is made here. Policies are for the admin key.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from polykv_proxy.api.context import ApiContext, read_body, require_admin
from polykv_proxy.api.queries import find, whole
from polykv_proxy.api.wire import json_object
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, policy_of
from polykv_proxy.core.pools import Pool
from polykv_proxy.runtime.admission import decision_facts
from polykv_proxy.runtime.admission_rows import standings

SHOWN = 100


def admission_routes(context: ApiContext) -> APIRouter:
    """The routes."""
    router = APIRouter()
    runtime = context.runtime
    admission = runtime.admission

    # -- policies -----------------------------------------------------------------------------------------------------

    @router.get("/polykv/admission")
    async def default_policy() -> Response:
        limits = admission.gate.limits
        bounds = {"max_running": limits.max_running, "max_queued": limits.max_queued}
        running = {"n_running": len(admission.gate.outlook.reservations), "n_queued": len(admission.gate.lines)}
        shown = {"policies": standings(runtime.hub, admission), "queue": admission.lines()}
        numbered = {"seq": runtime.hub.telemetry.news.number(), "ts": runtime.hub.clock.wall()}
        return JSONResponse({**_ruled(None), **bounds, **running, **shown, **numbered})

    @router.get("/polykv/pools/{key}/admission")
    async def pool_policy(key: str) -> Response:
        pool = find(context, key)
        queue = [waiting for waiting in admission.lines() if waiting["pool_id"] == pool.pool_id]
        return JSONResponse({**_ruled(pool), "queue": queue})

    @router.post("/polykv/admission")
    async def set_default_policy(request: Request) -> Response:
        await _set(request, None)
        return JSONResponse(_ruled(None))

    @router.post("/polykv/pools/{key}/admission")
    async def set_pool_policy(request: Request, key: str) -> Response:
        pool = find(context, key)
        await _set(request, pool)
        return JSONResponse(_ruled(find(context, str(pool.pool_id))))

    @router.delete("/polykv/admission")
    async def drop_default_policy(request: Request) -> Response:
        return await _drop(request, None)

    @router.delete("/polykv/pools/{key}/admission")
    async def drop_pool_policy(request: Request, key: str) -> Response:
        return await _drop(request, find(context, key))

    def _ruled(pool: Pool | None) -> dict[str, object]:
        """What holds there: of its own, from above (`inherited_from`), or nothing."""
        scope = DEFAULT_SCOPE if pool is None else pool.pool_id
        ruling = admission.ruling(None if pool is None else pool.pool_id)
        named = {} if pool is None else {"pool_id": pool.pool_id, "name": pool.name}
        return {
            **named,
            "policy": None if ruling is None else ruling.policy.as_object(),
            "inherited_from": None if ruling is None or ruling.scope == scope else ruling.scope,
        }

    async def _set(request: Request, pool: Pool | None) -> None:
        require_admin(context, request, "an admission policy")
        scope = DEFAULT_SCOPE if pool is None else pool.pool_id
        policy = policy_of(json_object(await read_body(context, request)), admission.own(scope), for_pool=pool is not None)
        await admission.set_policy(scope, policy)

    async def _drop(request: Request, pool: Pool | None) -> Response:
        require_admin(context, request, "an admission policy")
        dropped = await admission.drop_policy(DEFAULT_SCOPE if pool is None else pool.pool_id)
        return JSONResponse({**_ruled(pool), "removed": dropped is not None})

    # -- decisions ----------------------------------------------------------------------------------------------------

    @router.get("/polykv/decisions")
    async def decisions(request: Request) -> Response:
        limit = whole(request, "limit", at_least=1) or SHOWN
        found = list(admission.gate.decisions)[-limit:]
        clock = runtime.hub.clock
        age = clock.wall() - clock.monotonic()
        shown = [
            {
                "number": one.number,
                "ts": one.at + age,
                "outcome": one.verdict.outcome.value,
                **decision_facts(one.verdict, one.session),
            }
            for one in reversed(found)
        ]
        return JSONResponse(
            {"decisions": shown, "counts": admission.counts(), "seq": runtime.hub.telemetry.news.number(), "ts": clock.wall()}
        )

    return router
