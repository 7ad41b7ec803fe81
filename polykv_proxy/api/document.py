"""The OpenAPI document of `/polykv/*` and `/gpu/*`, at `GET /polykv/openapi.json`: one table, a line for each operation.

Law: says what routes do and does nothing itself; a test holds the table to the routes, and another answers to the document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter

from polykv_proxy.api import shapes, wire
from polykv_proxy.api.event_shapes import HAPPENINGS, MAKING, SPEEDS
from polykv_proxy.api.stream_routes import LONGEST_MS, SHORTEST_MS
from polykv_proxy.core.admission.policy import BOUNDS, Mode, OnSaturation, WhileHeld
from polykv_proxy.errors import KINDS
from polykv_proxy.runtime.news import Topic
from polykv_proxy.runtime.rows import PoolRow

PATH = "/polykv/openapi.json"
EVENTS = "text/event-stream"
_REF = "#/components/schemas/{model}"
_FLAG = {"type": "string", "enum": ["0", "1", "true", "false"]}
_NAME = {"type": "string"}
_KEYED = ("invalid_api_key", "forbidden")
_POOLED = ("pools_unsupported", "engine_starting", "engine_unavailable", "draining")
_BODY = ("invalid_request", "body_too_large", "request_timeout")
_MAKING = ("pool_busy", "cannot_fit", "saturated", "engine_protocol", "journal_failed", "engine_no_progress")


def _whole(least: int, most: int = 999_999_999) -> Mapping[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


@dataclass(frozen=True)
class Operation:
    """What one method of one path takes and answers. `answers`: a type by status, None without a body; `events`: types by the names
    of the events that 200 may send instead; `errors`: codes of KINDS."""

    summary: str
    answers: Mapping[int, Any]
    errors: Sequence[str] = ()
    body: Any = None
    body_needed: bool = True
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needed: Sequence[str] = ()
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    events: Mapping[str, Any] = field(default_factory=dict)
    pooled: bool = True


_MAKE = {
    "answers": {200: PoolRow, 201: PoolRow, 202: PoolRow},
    "errors": (*_BODY, *_MAKING, "session_not_found", "template_not_splittable"),
    "query": {"wait": _FLAG, "stream": _FLAG},
    "headers": {"Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"}},
    "events": MAKING,
}
_POLICY = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        **{
            name: {"type": "integer" if isinstance(one.low, int) else "number", "minimum": one.low, "maximum": one.high}
            for name, one in BOUNDS.items()
        },
        **{
            name: {"enum": list(words)}
            for name, words in (("mode", Mode), ("on_saturation", OnSaturation), ("while_held", WhileHeld))
        },
        "fail_fast": {"type": "boolean"},
        "protect_floors": {"type": "boolean"},
    },
}
_ANY = {"type": "object"}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/polykv/health"): Operation("How everything is; wants no key", {200: shapes.Health}, pooled=False),
    ("GET", PATH): Operation("This document", {200: _ANY}, pooled=False),
    ("POST", "/polykv/pools"): Operation("Make a pool", body=wire.CreatePool, **_MAKE),  # type: ignore[arg-type]
    ("GET", "/polykv/pools"): Operation("All pools", {200: shapes.PoolList, 304: None}, query={"depth": _whole(1)}),
    ("GET", "/polykv/pools/{key}"): Operation(
        "A pool and those below it", {200: shapes.PoolTree, 304: None}, query={"depth": _whole(0)}
    ),
    ("DELETE", "/polykv/pools/{key}"): Operation(
        "Release a pool",
        {200: shapes.PoolReleased, 202: shapes.PoolReleasing},
        ("pool_has_children", "pool_pinned", "journal_failed"),
        query={"recursive": _FLAG, "over_pins": _FLAG},
    ),
    ("POST", "/polykv/pools/{key}/fork"): Operation("Make a child of a pool", body=wire.ForkPool, **_MAKE),  # type: ignore[arg-type]
    ("POST", "/polykv/pools/{key}/compact"): Operation(
        "A shorter prefix in its place",
        {200: shapes.PoolCompacted, 201: shapes.PoolCompacted},
        (*_BODY, *_MAKING, "session_not_found", "template_not_splittable"),
        wire.CompactPool,
    ),
    ("POST", "/polykv/pools/{key}/pin"): Operation(
        "Keep it", {200: PoolRow}, (*_BODY, "conflict", "journal_failed"), wire.PinPool, False
    ),
    ("POST", "/polykv/pools/{key}/unpin"): Operation(
        "Keep it no longer", {200: PoolRow}, (*_BODY, "conflict", "journal_failed"), wire.UnpinPool, False
    ),
    ("POST", "/polykv/pools/{key}/renew"): Operation(
        "Begin its time anew", {200: PoolRow}, (*_BODY, "conflict", "journal_failed"), wire.RenewPool, False
    ),
    ("POST", "/polykv/pools/{key}/evict"): Operation(
        "Drop its KV", {200: shapes.PoolEvicted}, (*_BODY, "pool_busy", "engine_protocol"), wire.NoFields, False
    ),
    ("POST", "/polykv/pools/{key}/flush"): Operation(
        "Drop the KV below it", {200: shapes.SubtreeFlushed}, (*_BODY, "pool_busy", "engine_protocol"), wire.NoFields, False
    ),
    ("POST", "/polykv/pools/{key}/verify"): Operation(
        "Check its KV", {200: shapes.PoolChecked}, (*_BODY, *_MAKING), wire.VerifyPool, False
    ),
    ("GET", "/polykv/pools/{key}/tokens"): Operation("Its token ids", {200: shapes.PoolTokens}, ("pool_busy",)),
    ("GET", "/polykv/pools/{key}/text"): Operation("Its text", {200: shapes.PoolText}, ("pool_busy", "engine_protocol")),
    ("GET", "/polykv/pools/{key}/capacity"): Operation(
        "Room for a session of it", {200: shapes.PoolCapacity}, query={"expected_tokens": _whole(0), "session_id": _NAME}
    ),
    ("GET", "/polykv/pools/{key}/admission"): Operation("Its policy", {200: shapes.PolicyRuling}),
    ("POST", "/polykv/pools/{key}/admission"): Operation(
        "Set its policy", {200: shapes.PolicyRuling}, (*_BODY, "journal_failed"), _POLICY
    ),
    ("DELETE", "/polykv/pools/{key}/admission"): Operation("Drop its policy", {200: shapes.PolicyDropped}, ("journal_failed",)),
    ("GET", "/polykv/diff"): Operation(
        "Where two pools part", {200: shapes.Diff}, ("pool_not_found",), query={"a": _NAME, "b": _NAME}, needed=("a", "b")
    ),
    ("POST", "/polykv/match"): Operation(
        "What a request would share",
        {200: shapes.Match},
        (*_BODY, "pool_not_found", "engine_protocol"),
        _ANY,
        query={"route": _NAME},
    ),
    ("GET", "/polykv/sessions"): Operation("All sessions", {200: shapes.SessionList}),
    ("DELETE", "/polykv/sessions"): Operation(
        "End a session",
        {200: shapes.SessionEnded},
        ("session_not_found", "engine_protocol"),
        query={"session_id": _NAME},
        needed=("session_id",),
    ),
    ("GET", "/polykv/sessions/{session_id}"): Operation("A session", {200: shapes.SessionShown}, ("session_not_found",)),
    ("DELETE", "/polykv/sessions/{session_id}"): Operation(
        "End it", {200: shapes.SessionEnded}, ("session_not_found", "engine_protocol")
    ),
    ("GET", "/polykv/savings"): Operation("What pools spared", {200: shapes.Savings}, query={"days": _whole(1)}),
    ("GET", "/polykv/capacity"): Operation(
        "Room in the engine", {200: shapes.EngineCapacity}, query={"expected_tokens": _whole(0), "session_id": _NAME}
    ),
    ("GET", "/polykv/admission"): Operation("The default policy, and who waits", {200: shapes.PolicyStandings}),
    ("POST", "/polykv/admission"): Operation(
        "Set the default policy", {200: shapes.PolicyRuling}, (*_BODY, "journal_failed"), _POLICY
    ),
    ("DELETE", "/polykv/admission"): Operation("Drop the default policy", {200: shapes.PolicyDropped}, ("journal_failed",)),
    ("GET", "/polykv/decisions"): Operation("The last decisions", {200: shapes.Decisions}, query={"limit": _whole(1)}),
    ("GET", "/polykv/tps"): Operation(
        "Speeds, as events or once",
        {200: shapes.Speeds},
        query={"once": _FLAG, "running": _FLAG, "interval_ms": _whole(SHORTEST_MS, LONGEST_MS)},
        headers={"Last-Event-ID": _NAME},
        events=SPEEDS,
    ),
    ("GET", "/polykv/events"): Operation(
        "What happens, as events",
        {200: None},
        query={"topics": {"type": "array", "items": {"enum": [topic.value for topic in Topic]}, "minItems": 1}},
        headers={"Last-Event-ID": _NAME},
        events=HAPPENINGS,
    ),
    ("GET", "/gpu/peers"): Operation("Who shares the device", {200: shapes.Peers}),
    ("POST", "/gpu/weight"): Operation(
        "Set the engine's weight", {200: shapes.Weight}, (*_BODY, "gpu_share_off", "engine_protocol"), wire.SetWeight
    ),
}


@cache
def document() -> dict[str, Any]:
    """The whole document; made once."""
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation, schemas)
    info = {"title": "polykv-proxy", "version": "1", "description": "All other paths are the engine's."}
    keys = {"bearer": {"type": "http", "scheme": "bearer"}, "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"}}
    components = {"schemas": schemas, "securitySchemes": keys}
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": components,
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def document_route() -> APIRouter:
    """The route."""
    router = APIRouter()
    made = document()

    @router.get(PATH)
    async def openapi() -> Response:
        return JSONResponse(made)

    return router


def _operation(path: str, operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "required": name in operation.needed, "schema": schema, **_list(schema)}
        for name, schema in operation.query.items()
    ]
    parameters += [{"name": name, "in": "header", "schema": schema} for name, schema in operation.headers.items()]
    made: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": parameters,
        "responses": _responses(path, operation, schemas),
    }
    if operation.body is not None:
        body = {"application/json": {"schema": _schema(operation.body, schemas)}}
        made["requestBody"] = {"required": operation.body_needed, "content": body}
    return made


def _list(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A list in a query has commas."""
    return {"style": "form", "explode": False} if schema.get("type") == "array" else {}


def _responses(path: str, operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, shape in operation.answers.items():
        responses[str(status)] = {"description": "as asked"}
        if shape is not None:
            responses[str(status)]["content"] = {"application/json": {"schema": _schema(shape, schemas)}}
    if operation.events:
        content = responses["200"].setdefault("content", {})
        content[EVENTS] = {
            "itemSchema": {"oneOf": [_event(name, _schema(made, schemas)) for name, made in operation.events.items()]}
        }
    codes = [*operation.errors, *_KEYED, *((*_POOLED, "invalid_request") if operation.pooled else ())]
    codes += ["pool_not_found"] if "{key}" in path else []
    for code in codes:
        known = responses.setdefault(
            str(KINDS[code].status),
            {"description": "", "content": {"application/json": {"schema": _schema(shapes.Failed, schemas)}}},
        )
        known["description"] = ", ".join(sorted({*filter(None, known["description"].split(", ")), code}))
    return responses


def _event(name: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """A server-sent event of that name; its data are JSON."""
    return {
        "type": "object",
        "properties": {
            "event": {"const": str(name)},
            "id": {"type": "string"},
            "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": data},
        },
        "required": ["event", "data"],
    }


def _schema(shape: Any, schemas: dict[str, Any]) -> Mapping[str, Any]:
    """A schema as it is, or a reference to that of a type."""
    if isinstance(shape, Mapping):
        return shape
    if shape.__name__ not in schemas:
        mode: Literal["validation", "serialization"] = "validation" if shape.__module__ == wire.__name__ else "serialization"
        made = TypeAdapter(shape).json_schema(ref_template=_REF, mode=mode)
        schemas.update(made.pop("$defs", {}))
        schemas[shape.__name__] = made
    return {"$ref": _REF.format(model=shape.__name__)}
