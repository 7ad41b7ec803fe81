"""`/polykv/pools`: create, fork, list, show.

Law: parse, call the runtime, render; no decision is made here.
"""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from polykv_proxy.api.context import ApiContext, read_body
from polykv_proxy.api.pages import PoolsPage, subtree_page
from polykv_proxy.api.queries import find, flag, tagged, whole
from polykv_proxy.api.waiting import CLIENT_LEFT, as_events, first_step, outcome, outcome_for
from polykv_proxy.api.wire import CreatePool, ForkPool, parse
from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.idempotency import Ticket
from polykv_proxy.runtime.journal import Reply
from polykv_proxy.runtime.orders import PoolFlight, PoolSpec

_MAX_KEY = 255


def pool_routes(context: ApiContext) -> APIRouter:
    """The routes."""
    router = APIRouter()
    runtime = context.runtime
    pages = PoolsPage()

    @router.post("/polykv/pools")
    async def create_pool(request: Request) -> Response:
        body = await read_body(context, request)
        return await make(request, body, parse(CreatePool, body).spec())

    @router.post("/polykv/pools/{key}/fork")
    async def fork_pool(request: Request, key: str) -> Response:
        body = await read_body(context, request)
        return await make(request, body, replace(parse(ForkPool, body).spec(), parent=find(context, key).pool_id))

    async def make(request: Request, body: bytes, spec: PoolSpec) -> Response:
        wait, stream = flag(request, "wait", default=True), flag(request, "stream", default=False)
        ticket = _ticket(request, body)
        if ticket is not None and (reply := runtime.pools.desk.replay(ticket, runtime.hub.clock.wall())) is not None:
            return _replayed(reply)
        flight = runtime.pools.create(spec, ticket, keep=not wait)
        if stream:
            return await _streamed(flight)
        return await _awaited(request, flight) if wait else await _accepted(context, flight)

    @router.get("/polykv/pools")
    async def list_pools(request: Request) -> Response:
        depth = whole(request, "depth", at_least=1)
        return tagged(request, pages.pools(await runtime.look(), depth))

    @router.get("/polykv/pools/{key}")
    async def show_pool(request: Request, key: str) -> Response:
        depth = whole(request, "depth", at_least=0)
        view = await runtime.look()
        return tagged(request, subtree_page(view, find(context, key).pool_id, depth))

    return router


async def _awaited(request: Request, flight: PoolFlight) -> Response:
    made = await outcome_for(request, flight)
    if made is None:
        return Response(status_code=CLIENT_LEFT)
    return _json(made.reply, made.status, made.pool_id)


async def _accepted(context: ApiContext, flight: PoolFlight) -> Response:
    flight.keep = flight.kept_open = True
    step = await first_step(flight)
    state = await context.runtime.hub.state()
    pool = context.runtime.hub.ledger.tree.get(step.pool_id) if step is not None else None
    if pool is None:
        made = await outcome(flight)
        return _json(made.reply, made.status, made.pool_id)
    shown = context.runtime.view.pool(pool, state)
    return JSONResponse(shown, status_code=202, headers={"location": f"/polykv/pools/{pool.pool_id}"})


async def _streamed(flight: PoolFlight) -> Response:
    """Errors known before there is an id are plain answers."""
    with flight.held():
        if await first_step(flight) is None:
            await outcome(flight)
        return StreamingResponse(
            flight.holding(as_events(flight)), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )


def _json(reply: str, status: int, pool_id: int) -> Response:
    headers = {"location": f"/polykv/pools/{pool_id}"} if status == 201 else None
    return Response(reply, status_code=status, media_type="application/json", headers=headers)


def _replayed(reply: Reply) -> Response:
    return Response(reply.reply, status_code=reply.status, media_type="application/json", headers={"idempotent-replayed": "true"})


def _ticket(request: Request, body: bytes) -> Ticket | None:
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    key = key.strip()
    if not 0 < len(key) <= _MAX_KEY or not key.isascii() or not key.isprintable():
        raise ApiError(
            "invalid_request", f"Idempotency-Key must be 1 to {_MAX_KEY} printable ASCII characters", param="Idempotency-Key"
        )
    return Ticket.of(key, request.url.path, body)
