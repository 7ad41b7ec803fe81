"""The operator's page: `/polykv/ui` and the files it is made of.

Law: files only. They carry no data, so they want no key; what the page shows it asks for by the routes that everybody has. Only
what came from here as a file runs: the policy forbids inline scripts and styles, other hosts, and markup made of strings.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI, folder: Path = STATIC) -> None:
    """Add the page to the application."""
    files = StaticFiles(directory=folder)

    async def page(request: Request) -> Response:
        return await serve(request, "index.html")

    async def file(request: Request) -> Response:
        path = request.path_params["path"]
        # The page's own links are relative to /polykv/: with a slash at its end the same page would look for them elsewhere.
        return await serve(request, path) if path else RedirectResponse("../ui", headers=_HEADERS)

    async def serve(request: Request, path: str) -> Response:
        reply = await files.get_response(path, request.scope)
        reply.headers.update(_HEADERS)
        return reply

    app.add_route("/polykv/ui", page, methods=["GET"], include_in_schema=False)
    app.add_route("/polykv/ui/{path:path}", file, methods=["GET"], include_in_schema=False)
