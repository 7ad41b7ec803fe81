"""`/polykv/pools/{id}/verify`: does a pool still answer as a computation without it does?

Law: parse, call the runtime, render; no decision is made here.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from polykv_proxy.api.context import ApiContext, read_body, require_admin
from polykv_proxy.api.queries import find
from polykv_proxy.api.waiting import CLIENT_LEFT, outcome_for
from polykv_proxy.api.wire import VerifyPool, parse
from polykv_proxy.runtime.verifier import Checked


def verify_routes(context: ApiContext) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post("/polykv/pools/{key}/verify")
    async def verify_pool(request: Request, key: str) -> Response:
        require_admin(context, request, "verify")
        order = parse(VerifyPool, await read_body(context, request) or b"{}").order()
        pool = find(context, key)
        checked = await outcome_for(request, context.runtime.verifier.verify(pool.pool_id, order))
        if checked is None:
            return Response(status_code=CLIENT_LEFT)
        return JSONResponse({**_shown(checked), "name": pool.name})

    return router


def _shown(checked: Checked) -> dict[str, object]:
    finding = checked.finding
    judged = finding.judgement
    return {
        "pool_id": checked.pool_id,
        "verdict": finding.verdict.value,
        "reason": finding.reason,
        "n_positions": len(judged.distances),
        "max_abs_diff": judged.max_abs_diff,
        "tolerance": judged.tolerance,
        "positions": [
            {"position": position, "max_abs_diff": off, "ok": off <= judged.tolerance} for position, off in judged.distances.items()
        ],
        "n_tokens_computed": finding.n_computed,
        "took_s": checked.took_s,
        "residency": checked.residency.value,
        "quarantined": list(finding.quarantined),
    }
