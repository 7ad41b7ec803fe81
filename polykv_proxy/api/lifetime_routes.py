"""`/polykv/pools/{id}/pin`, `unpin`, `renew`, `evict`, `flush`, `compact`, and the release of pools.

Law: parse, call the runtime, render; no decision is made here.
"""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from polykv_proxy.api.context import ApiContext, read_body, require_admin
from polykv_proxy.api.queries import find, flag
from polykv_proxy.api.waiting import CLIENT_LEFT, outcome_for
from polykv_proxy.api.wire import CompactPool, NoFields, PinPool, RenewPool, UnpinPool, parse
from polykv_proxy.errors import ApiError


def lifetime_routes(context: ApiContext) -> APIRouter:
    """The routes."""
    router = APIRouter()
    lifetimes = context.runtime.lifetimes

    @router.post("/polykv/pools/{key}/pin")
    async def pin_pool(request: Request, key: str) -> Response:
        wanted = parse(PinPool, await read_body(context, request) or b"{}")
        pool = find(context, key)
        if wanted.lease == "none":
            require_admin(context, request, "a pin without a lease")
        await lifetimes.pin(pool.pool_id, wanted.owner, None if wanted.lease == "none" else wanted.lease)
        return await _shown(context, pool.pool_id)

    @router.post("/polykv/pools/{key}/unpin")
    async def unpin_pool(request: Request, key: str) -> Response:
        wanted = parse(UnpinPool, await read_body(context, request) or b"{}")
        pool = find(context, key)
        await lifetimes.unpin(pool.pool_id, wanted.owner)
        return await _shown(context, pool.pool_id)

    @router.post("/polykv/pools/{key}/renew")
    async def renew_pool(request: Request, key: str) -> Response:
        wanted = parse(RenewPool, await read_body(context, request) or b"{}")
        pool = find(context, key)
        await lifetimes.renew(pool.pool_id, wanted.ttl_s)
        return await _shown(context, pool.pool_id)

    @router.post("/polykv/pools/{key}/evict")
    async def evict_pool(request: Request, key: str) -> Response:
        parse(NoFields, await read_body(context, request) or b"{}")
        pool = find(context, key)
        evicted = await lifetimes.evict(pool.pool_id)
        return JSONResponse({"pool_id": pool.pool_id, "name": pool.name, "evicted": evicted})

    @router.post("/polykv/pools/{key}/flush")
    async def flush_pool(request: Request, key: str) -> Response:
        parse(NoFields, await read_body(context, request) or b"{}")
        pool = find(context, key)
        flushed = await lifetimes.flush(pool.pool_id)
        kept = [{"pool_id": pool_id, "kept_by": keep.value} for pool_id, keep in flushed.kept.items()]
        return JSONResponse({"pool_id": pool.pool_id, "name": pool.name, "evicted": list(flushed.evicted), "kept": kept})

    @router.post("/polykv/pools/{key}/compact")
    async def compact_pool(request: Request, key: str) -> Response:
        wanted = parse(CompactPool, await read_body(context, request))
        old = find(context, key)
        context.runtime.compaction.check(old.pool_id, wanted.migrate)
        flight = context.runtime.pools.create(replace(wanted.spec(), beside=old.pool_id))
        made = await outcome_for(request, flight)
        if made is None:
            return Response(status_code=CLIENT_LEFT)
        done = await context.runtime.compaction.finish(old.pool_id, made, wanted.migrate)
        facts = {
            "from": old.pool_id,
            "migrated": list(done.migrated),
            "released": list(done.released),
            "retiring": list(done.retiring),
        }
        state = await context.runtime.hub.state()
        shown = context.runtime.view.pool(context.runtime.pools.find(made.pool_id), state)
        headers = {"location": f"/polykv/pools/{made.pool_id}"}
        return JSONResponse({**shown, "compacted": facts}, status_code=made.status, headers=headers)

    @router.delete("/polykv/pools/{key}")
    async def release_pool(request: Request, key: str) -> Response:
        recursive = flag(request, "recursive", default=False)
        over_pins = flag(request, "over_pins", default=False)
        if over_pins and not recursive:
            raise ApiError("invalid_request", "over_pins goes with recursive=1; unpin a single pool instead", param="over_pins")
        if over_pins:
            require_admin(context, request, "a release over the pins of others")
        pool = find(context, key)
        released = await lifetimes.release(pool.pool_id, recursive=recursive, over_pins=over_pins)
        facts: dict[str, object] = {"pool_id": pool.pool_id, "name": pool.name, "detached_sessions": list(released.detached)}
        if released.n_running:
            return JSONResponse({**facts, "residency": "releasing", "n_running": released.n_running}, status_code=202)
        return JSONResponse({**facts, "released": True, "released_pools": list(released.pool_ids)})

    return router


async def _shown(context: ApiContext, pool_id: int) -> Response:
    state = await context.runtime.hub.state()
    return JSONResponse(context.runtime.view.pool(context.runtime.pools.find(pool_id), state))
