"""Looks at a proxy over HTTP.

Law: one look is one set of questions at the same time; a failure is a snapshot with its words, so that a display can go on.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx

from polykv_proxy.ui.top.snapshot import Facts, Snapshot

_ROUTES = {
    "health": "/polykv/health",
    "tree": "/polykv/pools",
    "tps": "/polykv/tps?once=1",
    "savings": "/polykv/savings?days=1",
    "admission": "/polykv/admission",
    "decisions": "/polykv/decisions?limit=20",
    "gpu": "/gpu/peers",
}
_TIMEOUT_S = 10.0


class Remote:
    """One proxy. After a failed look the last good answers stay, under the trouble."""

    def __init__(self, url: str, api_key: str | None = None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = url if "://" in url else f"http://{url}"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False, transport=transport
        )
        self._last = Snapshot()

    async def look(self) -> Snapshot:
        """The proxy as it is now."""
        try:
            replies = await asyncio.gather(*[self._client.get(path) for path in _ROUTES.values()])
            answers = dict(zip(_ROUTES, replies, strict=True))
            trouble = _refusal(answers["tree"], given="authorization" in self._client.headers)
            found = {name: _facts(reply) for name, reply in answers.items()}
        except httpx.HTTPError as error:
            return replace(self._last, trouble=f"nothing answers at {self.url} ({error or type(error).__name__})")
        except ValueError:
            return replace(self._last, trouble=f"{self.url} answers without JSON; is it a polykv-proxy?")
        self._last = Snapshot(trouble, **found)
        return self._last

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.aclose()


def key_hint(*, given: bool) -> str:
    """What helps after a 401, to be said behind its message."""
    return "; the key that was given (--api-key, POLYKV_API_KEY) is none of the proxy's" if given else "; give --api-key"


def _refusal(reply: httpx.Response, *, given: bool) -> str | None:
    """Why a route gave no facts, in words."""
    if not reply.is_error:
        return None
    message = _error(reply.json()).get("message", f"status {reply.status_code}")
    return f"{message}{key_hint(given=given)}" if reply.status_code == httpx.codes.UNAUTHORIZED else str(message)


def _facts(reply: httpx.Response) -> Facts:
    facts = {} if reply.is_error else reply.json()
    return facts if isinstance(facts, dict) else {}


def _error(body: Any) -> Facts:
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}
