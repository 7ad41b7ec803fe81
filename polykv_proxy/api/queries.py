"""What the routes take from a path and a query, and how a reply says that nothing is new.

Law: bad values, and parameters that a route does not have, are an ApiError that names them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from fastapi import Request, Response

from polykv_proxy.api.context import ApiContext
from polykv_proxy.core.pools import Pool, is_pool_number
from polykv_proxy.errors import ApiError

NOT_MODIFIED = 304


def find(context: ApiContext, key: str) -> Pool:
    """The pool that a path names, by id or name. ApiError 404."""
    return context.runtime.pools.find(int(key) if is_pool_number(key) else key)


def check_query(request: Request, known: Mapping[str, Mapping[str, object]]) -> None:
    """ApiError 400 for a parameter that is not among `known` (a schema each), or comes twice and is no list."""
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        shown = ascii(name)[1:-1][:80]
        if name not in known:
            takes = f"known are {', '.join(known)}" if known else "this route takes none"
            raise ApiError("invalid_request", f"unknown query parameter {shown}; {takes}", param=shown)
        if name in seen and known[name].get("type") != "array":
            raise ApiError("invalid_request", f"the query has {shown} more than once; give it once", param=shown)
        seen.add(name)


def flag(request: Request, name: str, *, default: bool) -> bool:
    """A query parameter that is 0 or 1."""
    value = request.query_params.get(name)
    if value is None:
        return default
    if value in {"1", "true"}:
        return True
    if value in {"0", "false"}:
        return False
    raise ApiError("invalid_request", f"{name} must be 0 or 1, not {value!r:.40}", param=name)


MOST = 999_999_999


def whole(request: Request, name: str, *, at_least: int, at_most: int = MOST) -> int | None:
    """A query parameter that is a whole number, None without it."""
    value = request.query_params.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= len(str(MOST)) and at_least <= int(value) <= at_most):
        raise ApiError(
            "invalid_request", f"{name} must be a whole number from {at_least} to {at_most}, not {value!r:.40}", param=name
        )
    return int(value)


def tagged(request: Request, shown: Mapping[str, object]) -> Response:
    """A JSON reply with its ETag, or 304 for a caller that has it already."""
    body = json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    known = {one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")}
    if tag in known or "*" in known:
        return Response(status_code=NOT_MODIFIED, headers=headers)
    return Response(body, media_type="application/json", headers=headers)
