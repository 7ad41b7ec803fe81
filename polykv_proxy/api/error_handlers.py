"""Errors as answers: always OpenAI-shaped, also those of the web framework.

Law: one place; a route raises, it never builds an error answer.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from polykv_proxy.api.methods import allowed
from polykv_proxy.api.waiting import CLIENT_LEFT
from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.answers import api_error

log = logging.getLogger("polykv.api")


def answer(error: ApiError, end: bytes = b"") -> Response:
    """The answer that says this error."""
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body() + end, status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Register the handlers."""

    async def ours(_request: Request, error: Exception) -> Response:
        return answer(api_error(error))

    async def framework(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 405:
            message = f"{request.method} is not for {request.url.path}; see docs/http-api.md"
            refused = answer(ApiError("method_not_allowed", message))
            refused.headers["allow"] = allowed(app.router.routes, request.scope)
            return refused
        if status == 404:
            return answer(ApiError("not_found", f"there is nothing at {request.url.path}; see docs/http-api.md"))
        return answer(ApiError("invalid_request", str(error)))

    async def unforeseen(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        failed = ApiError("internal_error", "this request failed inside the proxy; its log has the details")
        return answer(failed, b"\n")  # outside of all that ends lines

    async def left(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)

    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(Exception, unforeseen)
