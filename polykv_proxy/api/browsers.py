"""What a page of somebody else, open in a browser on this machine, must not do with our routes.

Law: looks at the head of a request alone. Callers that are no browser (they send neither `Sec-Fetch-Site` nor `Origin`) are never
refused for being one.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from polykv_proxy.api.error_handlers import answer
from polykv_proxy.api.local_names import LocalNames
from polykv_proxy.errors import ApiError

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_OURS = frozenset({"same-origin", "none"})
_ELSEWHERE = "changes are not taken from a page of another origin; go through a server of that page's own"

_STRANGE = (
    "without an API key this proxy is not called by the name {0}, which any web page could use: call it by its address, give it an "
    "API key, or start it with --allowed-hosts {0}"
)


class Browsers:
    """Refuses what only a stranger's page would send. `names`: by which we may be called; None where that does not matter."""

    def __init__(self, app: ASGIApp, names: LocalNames | None) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        refused = self._objection(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if refused is None else answer(ApiError("forbidden", refused)))(scope, receive, send)

    def _objection(self, method: str, headers: Headers) -> str | None:
        """1. Called by a name that a stranger may have pointed here (DNS rebinding). 2. A read: the browser keeps its answer from
        other origins. 3. The browser says that another origin sends it. 4. An older browser names the origin, and it is not ours.
        """
        hosts = headers.getlist("host")
        for name in map(_name_of, hosts):
            if self._names is not None and not self._names.has(name):
                return _STRANGE.format(f"{name:.80}")
        if method in _READS:
            return None
        site = headers.get("sec-fetch-site")
        if site is not None:
            return None if site in _OURS else _ELSEWHERE
        origin = headers.get("origin")
        return None if origin is None or [host.lower() for host in hosts] == [origin.partition("://")[2]] else _ELSEWHERE


def _name_of(host: str) -> str:
    """The name in a Host field, without its port."""
    host = host.strip().lower()
    return (host if host.endswith("]") else host.rpartition(":")[0] or host).rstrip(".")
