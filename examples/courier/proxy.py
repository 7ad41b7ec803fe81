"""The verbs of the proxy that a courier needs.

Law: one method for each verb; what the proxy refuses is raised, with its own words.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import httpx

from examples.courier.work import Message


@dataclass(frozen=True, slots=True)
class Capacity:
    """The fields of `GET /polykv/pools/{id}/capacity` that matter here; the proxy's docs/http-api.md has all."""

    ts: float
    can_admit: bool
    reason: str
    headroom_sessions: int
    settling: bool
    n_warming: int
    n_active: int
    n_pool_sessions: int
    n_queued: int
    mean_active_tps: float | None
    projected_mean_tps_if_admitted: float | None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """From the proxy's JSON."""
        return cls(**{field.name: said[field.name] for field in fields(cls)})


class SaturatedError(Exception):
    """429: not now. `retry_after_s` None: the pool's policy says that trying again is of no use."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TurnError(Exception):
    """A turn that did not come to its end; the text is the proxy's."""


class Proxy:
    """A proxy, and one pool of it. `http` has its address, and a key if it wants one."""

    def __init__(self, http: httpx.AsyncClient, pool_id: int) -> None:
        self._http = http
        self.pool_id = pool_id

    @classmethod
    async def with_pool(cls, http: httpx.AsyncClient, messages: Sequence[Message]) -> Self:
        """A new pool of these messages."""
        return cls(http, (await _call(http, "POST", "/polykv/pools", {"messages": list(messages)}))["pool_id"])

    async def set_policy(self, **fields: object) -> None:
        """The pool's admission policy."""
        await _call(self._http, "POST", f"/polykv/pools/{self.pool_id}/admission", fields)

    async def capacity(self) -> Capacity:
        """May one more start?"""
        return Capacity.of(await _call(self._http, "GET", f"/polykv/pools/{self.pool_id}/capacity"))

    async def decisions(self) -> list[dict[str, Any]]:
        """What was decided about requests of this pool, oldest first."""
        said = await _call(self._http, "GET", "/polykv/decisions?limit=1000")
        return [one for one in reversed(said["decisions"]) if one["pool_id"] == self.pool_id]

    async def end_session(self, session: str) -> None:
        """Gives back what it holds; one that never began is no mistake."""
        reply = await self._http.delete("/polykv/sessions", params={"session_id": session})
        if reply.status_code not in {200, 404}:
            raise TurnError(reply.text)

    async def release(self) -> None:
        """The pool goes."""
        await _call(self._http, "DELETE", f"/polykv/pools/{self.pool_id}")

    async def turn(
        self, session: str, messages: Sequence[Message], max_tokens: int, **more: object
    ) -> AsyncIterator[dict[str, Any]]:
        """One chat completion on the pool, chunk by chunk."""
        body = {"messages": list(messages), "max_tokens": max_tokens, "stream": True, **more}
        body |= {"pool_id": self.pool_id, "session_id": session}
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                raise _refusal(reply)
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise TurnError(chunk["error"]["message"])
                    yield chunk


async def _call(http: httpx.AsyncClient, method: str, path: str, body: object = None) -> dict[str, Any]:
    reply = await http.request(method, path, json=body)
    if reply.is_error:
        raise TurnError(f"{method} {path} was answered by {reply.status_code}: {reply.text}")
    said: dict[str, Any] = reply.json()
    return said


def _refusal(reply: httpx.Response) -> Exception:
    if reply.status_code != 429:
        return TurnError(f"{reply.status_code}: {reply.text}")
    again = reply.headers.get("x-should-retry") != "false"
    return SaturatedError(reply.text, float(reply.headers.get("retry-after", 1)) if again else None)
