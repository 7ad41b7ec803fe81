"""What pools hold and what requests would share: `tokens`, `text`, `diff`, `match`.

Law: reads only; nothing here changes a record or uses a slot of the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from polykv_proxy.api.context import ApiContext, read_body
from polykv_proxy.api.queries import find
from polykv_proxy.api.relay.targets import Routes
from polykv_proxy.api.wishes import read_wish
from polykv_proxy.core.matching import Verdict, would_share
from polykv_proxy.core.pools import Pool
from polykv_proxy.core.prefix import Tokens, common_prefix
from polykv_proxy.errors import ApiError, EngineError, EngineRefusedError
from polykv_proxy.runtime.answers import api_error
from polykv_proxy.runtime.texts import text_around

_BY_FIELD = (("messages", "/v1/chat/completions"), ("input", "/v1/responses"), ("input_prefix", "/infill"))
_PASSED_ON = frozenset({b"authorization", b"x-api-key", b"content-type"})


def look_routes(context: ApiContext) -> APIRouter:
    """The routes."""
    router = APIRouter()
    runtime = context.runtime
    hub = runtime.hub

    @router.get("/polykv/pools/{key}/tokens")
    async def pool_tokens(key: str) -> Response:
        pool = _known(find(context, key))
        return JSONResponse({"pool_id": pool.pool_id, "prefix_len": pool.prefix_len, "tokens": pool.tokens.tolist()})

    @router.get("/polykv/pools/{key}/text")
    async def pool_text(key: str) -> Response:
        pool = _known(find(context, key))
        hub.require_engine()
        try:
            text = await hub.client.detokenize(pool.tokens)
        except EngineError as error:
            raise api_error(error) from error
        return JSONResponse({"pool_id": pool.pool_id, "prefix_len": pool.prefix_len, "text": text})

    @router.get("/polykv/diff")
    async def diff(request: Request) -> Response:
        a, b = (_asked(context, request, name) for name in ("a", "b"))
        common = common_prefix(a.tokens, b.tokens)
        sides = {}
        for name, pool in (("a", a), ("b", b)):
            sides[name] = {
                "pool_id": pool.pool_id,
                "name": pool.name,
                "prefix_len": pool.prefix_len,
                "next_token": int(pool.tokens[common]) if common < pool.prefix_len else None,
                "text": await _around(pool.tokens, common),
            }
        return JSONResponse({"common_len": common, "equal": common == a.prefix_len == b.prefix_len, **sides})

    @router.post("/polykv/match")
    async def match(request: Request) -> Response:
        hello = hub.require_engine()
        body = await read_body(context, request)
        headers = request.scope["headers"]
        wish = read_wish(headers, body, context.default_pool, lambda key: hub.ledger.tree.find(key) is not None)
        route = _route(request, body)
        passed = [(name, value) for name, value in headers if name in _PASSED_ON]
        try:
            prompts = await hub.client.dry_run(hub.client.api_prefix + route, body, passed)
        except EngineRefusedError as error:
            if error.status == 503:
                raise api_error(error) from error
            raise ApiError("invalid_request", f"the engine refuses this on {route}: {error.message}", param=error.param) from error
        except EngineError as error:
            raise api_error(error) from error
        verdicts = [would_share(hub.ledger.tree, wish, prompt, exact_only=hello.prefix_sharing != "any") for prompt in prompts]
        shown = [await _shown(prompt, verdict) for prompt, verdict in zip(prompts, verdicts, strict=True)]
        return JSONResponse({"route": route, "prompts": shown})

    async def _shown(prompt: Tokens, verdict: Verdict) -> Mapping[str, object]:
        pool, at = verdict.pool, verdict.n_matched
        differs = pool is not None and at < min(pool.prefix_len, prompt.size)
        return {
            "n_prompt": int(prompt.size),
            "pool_id": pool.pool_id if pool else None,
            "name": pool.name if pool else None,
            "residency": pool.residency.value if pool else None,
            "prefix_len": pool.prefix_len if pool else None,
            "attaches": verdict.attaches,
            "n_matched": at,
            "n_shared": verdict.n_shared,
            "why_not": verdict.why_not,
            "first_differing_position": at if differs else None,
            "pool_text": await _around(pool.tokens, at) if pool is not None and differs else None,
            "prompt_text": await _around(prompt, at) if differs else None,
        }

    async def _around(tokens: Tokens, position: int) -> str | None:
        return await text_around(hub.client, tokens, position) if hub.linked else None

    return router


def _asked(context: ApiContext, request: Request, name: str) -> Pool:
    key = request.query_params.get(name)
    if not key:
        raise ApiError("invalid_request", "name two pools, ?a=POOL&b=POOL", param=name)
    return find(context, key)


def _route(request: Request, body: bytes) -> str:
    """The generating route that the body is for: the one asked for, else the one that its fields point to."""
    known = sorted(route.decode() for route in Routes().generating)
    asked = request.query_params.get("route")
    if asked is not None:
        if asked not in known:
            raise ApiError("invalid_request", f"route must be one of {', '.join(known)}, not {asked!r:.80}", param="route")
        return asked
    fields: Any = None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError("invalid_request", f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError("invalid_request", "the body must be a JSON object: that of a request on a generating route")
    return next((route for field, route in _BY_FIELD if field in fields), "/completion")


def _known(pool: Pool) -> Pool:
    """ApiError 409 while a snapshot is being taken: whose tokens it will have is known when it has them."""
    if not pool.prefix_len:
        raise ApiError("pool_busy", f"pool {pool.pool_id} is being made from a session; its tokens are known once it is there")
    return pool
