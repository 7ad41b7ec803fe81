"""`/polykv/sessions`: list, show, end.

Law: parse, call the runtime, render; no decision is made here.
"""

from __future__ import annotations

from fastapi import APIRouter, Response
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

    @router.delete("/polykv/sessions/{session_id:path}")
    async def end_session(session_id: str) -> Response:
        ended = await runtime.end_session(session_id)
        return JSONResponse(
            {"session_id": session_id, "ended": True, "cancelled": ended.cancelled, "cells_freed": ended.cells_freed}
        )

    return router
