"""`/polykv/capacity`, of one pool too.

Law: parse, call the runtime, render; asks and reserves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from polykv_proxy.api.context import ApiContext
from polykv_proxy.api.pages import capacity_page
from polykv_proxy.api.queries import find, whole
from polykv_proxy.core.pools import Pool
from polykv_proxy.core.throughput import mean
from polykv_proxy.engine.wire import State
from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.rows import StateView


def capacity_routes(context: ApiContext) -> APIRouter:
    """The routes."""
    router = APIRouter()
    runtime = context.runtime

    @router.get("/polykv/capacity")
    async def capacity(request: Request) -> Response:
        state, view = await _look()
        return JSONResponse({**_report(request, None, state, view), **capacity_page(runtime.hub.ledger, view, state.update)})

    @router.get("/polykv/pools/{key}/capacity")
    async def pool_capacity(request: Request, key: str) -> Response:
        pool = find(context, key)
        state, view = await _look()
        facts = {"pool_id": pool.pool_id, "name": pool.name, "mean_pool_tps": _mean_tps(view, pool.pool_id)}
        return JSONResponse({**facts, **_report(request, pool, state, view), "seq": view.seq, "ts": view.ts})

    async def _look() -> tuple[State, StateView]:
        hello = runtime.hub.require_engine()
        state = await runtime.hub.state()
        if state is None:
            raise ApiError("engine_unavailable", "the engine does not answer", retry_after_s=1)
        return state, runtime.view.look(hello, state)

    def _report(request: Request, pool: Pool | None, state: State, view: StateView) -> Mapping[str, object]:
        report = runtime.admission.capacity(
            pool,
            state,
            view.whole.compaction_pressure,
            expected_tokens=whole(request, "expected_tokens", at_least=0),
            session_id=request.query_params.get("session_id"),
        )
        streams = {"kv_streams_total": view.whole.kv_streams_total, "kv_streams_free": view.whole.kv_streams_free}
        return {**report.as_object(), **streams}

    return router


def _mean_tps(view: StateView, pool_id: int) -> float | None:
    """Over the sessions of this pool that decode; the floor is held against the mean of all."""
    active = [
        row.tps_ewma for row in view.sessions if row.pool_id == pool_id and row.state == "active" and row.tps_ewma is not None
    ]
    return mean(active)
