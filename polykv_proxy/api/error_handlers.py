"""Errors as answers: always OpenAI-shaped, also those of the web framework.

Law: one place; a route raises, it never builds an error answer.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polykv_proxy.api.methods import allowed
from polykv_proxy.api.waiting import CLIENT_LEFT
from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.answers import api_error

log = logging.getLogger("polykv.api")


def answer(error: ApiError) -> Response:
    """The answer that says this error."""
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), status_code=error.status, headers=headers)


class Faults:
    """Answers what no handler knows, and says it in the log, once. What has begun is broken off, and the server says why."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            log.exception("%s %s failed", scope["method"], scope["path"], exc_info=error)
            failed = ApiError("internal_error", "this request failed inside the proxy; its log has the details")
            await answer(failed)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Register the handlers. What is put around the application later sees their answers."""

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

    async def left(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)

    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(HTTPException, framework)
    app.add_middleware(Faults)
