"""`/polykv/sessions`: list, show, end.

Law: parse, call the runtime, render; no decision is made here.
"""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from polykv_proxy.api.context import ApiContext
from polykv_proxy.errors import ApiError


def session_routes(context: ApiContext) -> APIRouter:
    """The routes."""
    router = APIRouter()
    runtime = context.runtime

    @router.get("/polykv/sessions")
    async def list_sessions() -> Response:
        return JSONResponse(runtime.view.sessions(await runtime.state()))

    @router.get("/polykv/sessions/{session_id:path}")
    async def show_session(session_id: str) -> Response:
        state = await runtime.state()
        session = runtime.hub.ledger.sessions.get(session_id)
        if session is None:
            raise ApiError("session_not_found", f"there is no session {session_id!r}; GET /polykv/sessions lists those there are")
        return JSONResponse(runtime.view.session(session, state))

    @router.delete("/polykv/sessions/{session_id:path}")
    async def end_session(session_id: str) -> Response:
        ended = await runtime.end_session(session_id)
        return JSONResponse(
            {"session_id": session_id, "ended": True, "cancelled": ended.cancelled, "cells_freed": ended.cells_freed}
        )

    return router
