"""A scripted engine with our extras on a port of its own, for chat models that are tested from any thread and any loop.

Law: the request's `pool_id` says what goes wrong: `full` 429, `fast` the same for good, `gone` 404, `ctx` overflow, `hold` chunks
without choices before the answer, `midfail` an error event after some text, `midfull` the same for want of room, `cut` a stream
without an end.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fakes.fake_server import QuietServer
from tests.fakes.scripted_chat import TIMINGS, Answer, Brain, capable, events, usage_of, whole

FULL = {
    "message": "projected mean tps below floor", "type": "rate_limit_error", "code": "saturated", "param": None, "retry_after": 7,
    "pool_id": 3, "headroom_sessions": 0, "mean_active_tps": 4.5, "arm": "floor",
}  # fmt: skip
GONE = {"message": "no pool gone", "type": "not_found_error", "code": "pool_not_found", "param": "pool_id"}
OVERFLOW = {"message": "too long", "type": "exceed_context_size_error", "code": 400, "n_prompt_tokens": 5000, "n_ctx": 4096}
AWAY = {"message": "the engine went away", "type": "unavailable_error", "code": "engine_unavailable", "param": None}
REFUSALS = {
    "full": (429, FULL, {"retry-after": "7"}),
    "fast": (429, FULL, {"retry-after": "7", "x-should-retry": "false"}),
    "gone": (404, GONE, {}),
    "ctx": (400, OVERFLOW, {}),
}
N_CACHED = 5


@dataclass
class Scripted:
    """The server. `bodies` and `headers` are what came."""

    url: str
    brain: Brain = capable
    timings_always: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        pool = body.get("pool_id")
        if pool in REFUSALS:
            status, error, headers = REFUSALS[pool]
            return JSONResponse({"error": error}, status, headers)
        answer = self.brain(body)
        usage = usage_of(body, answer, N_CACHED)
        if not body.get("stream"):
            return JSONResponse(whole(body, answer, usage, extras_for(body)))
        return StreamingResponse(self._stream(body, answer, usage), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], answer: Answer, usage: dict[str, Any]) -> AsyncIterator[str]:
        told = list(events(body, answer, usage, extras_for(body), timings_always=self.timings_always))
        pool = body.get("pool_id")
        if pool == "hold":
            told[:0] = [{**told[0], "choices": []}] * 3
        if pool in {"midfail", "midfull"}:
            told[2:] = [{"error": AWAY if pool == "midfail" else FULL}]
        for event in told[:3] if pool == "cut" else told:
            yield f"data: {json.dumps(event)}\n\n"
        if pool != "cut":
            yield "data: [DONE]\n\n"

    async def match(self, request: Request) -> Response:
        body = await request.json()
        n = sum(len(str(message.get("content")).split()) + 4 for message in body["messages"]) + 10 * len(body.get("tools") or [])
        return JSONResponse({"route": "/v1/chat/completions", "prompts": [{"n_prompt": n}]})

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": [len(word) for word in (await request.json())["content"].split()]})


def extras_for(body: dict[str, Any]) -> dict[str, Any]:
    """`timings`, and `opencoti` where the request named a pool or a session."""
    named = {key: body.get(key) for key in ("pool_id", "session_id")}
    if not any(named.values()):
        return {"timings": TIMINGS}
    facts = {"session_tps": 21.5, "backpressure": "held", "headroom_sessions": 2, "ctx_headroom_tokens": 900}
    return {"timings": TIMINGS, "opencoti": {**named, **facts, "cached_prefix_tokens": N_CACHED, "miss": None}}


@contextmanager
def scripted() -> Iterator[Scripted]:
    """Serve in a thread."""
    sock = socket.create_server(("127.0.0.1", 0))
    state = Scripted(f"http://127.0.0.1:{sock.getsockname()[1]}/v1")
    routes = {"/v1/chat/completions": state.chat, "/polykv/match": state.match, "/tokenize": state.tokenize}
    app = Starlette(routes=[Route(path, page, methods=["POST"]) for path, page in routes.items()])
    server = QuietServer(uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield state
    finally:
        server.should_exit = True
        thread.join()
