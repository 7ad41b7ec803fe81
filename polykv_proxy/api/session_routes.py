"""`/polykv/sessions`: list, show, end.

Law: parse, call the runtime, render; no decision is made here.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from polykv_proxy.api.context import ApiContext
from polykv_proxy.api.pages import sessions_page
from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.rows import as_json


def session_routes(context: ApiContext) -> APIRouter:
    """The routes."""
    router = APIRouter()
    runtime = context.runtime

    @router.get("/polykv/sessions")
    async def list_sessions() -> Response:
        return JSONResponse(sessions_page(await runtime.look()))

    @router.get("/polykv/sessions/{session_id:path}")
    async def show_session(session_id: str) -> Response:
        view = await runtime.look()
        session = next((row for row in view.sessions if row.session_id == session_id), None)
        if session is None:
            raise ApiError("session_not_found", f"there is no session {session_id!r}; GET /polykv/sessions lists those there are")
        return JSONResponse({**as_json(session), "seq": view.seq, "ts": view.ts})

    @router.delete("/polykv/sessions")
    async def end_named_session(request: Request) -> Response:
        session_id = request.query_params.get("session_id")
        if not session_id:
            raise ApiError("invalid_request", "say which: ?session_id=ID, or the id in the path", param="session_id")
        return await end(session_id)

    @router.delete("/polykv/sessions/{session_id:path}")
    async def end_session(session_id: str) -> Response:
        return await end(session_id)

    async def end(session_id: str) -> Response:
        ended = await runtime.end_session(session_id)
        return JSONResponse(
            {"session_id": session_id, "ended": True, "cancelled": ended.cancelled, "cells_freed": ended.cells_freed}
        )

    return router
