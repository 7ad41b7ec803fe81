"""HEAD and OPTIONS on our own routes, and the methods that a path has.

Law: in front of the routes and their key check: a browser's preflight carries no key. No other origin is let in here.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

_ASKED = ("GET", "POST", "PUT", "PATCH", "DELETE")


class Methods:
    """HEAD is GET without its body (the server leaves that out, streams never begin); OPTIONS names the methods of a path."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and scope["method"] == "OPTIONS" and (allow := allowed(self._routes, scope)):
            await Response(status_code=204, headers={"allow": allow})(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET", "polykv.head": True}, receive, send)
        else:
            await self._app(scope, receive, send)


def allowed(routes: Sequence[BaseRoute], scope: Scope) -> str:
    """The value of `Allow` for a path; empty when nothing is there."""
    found = [method for method in _ASKED if any(_has(route, {**scope, "method": method}) for route in routes)]
    if "GET" in found:
        found.insert(1, "HEAD")
    return ", ".join([*found, "OPTIONS"]) if found else ""


def _has(route: BaseRoute, scope: Scope) -> bool:
    return route.matches(scope)[0] is Match.FULL
