"""The fake engine over HTTP on a unix socket, in this process.

Law: HTTP only; what happens is FakeEngine's business. `crash` cuts all connections at once, as a killed process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from asyncio import sleep  # ours: a test may put another one in its place, and some servers live as long as all tests
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fakes import fake_files
from tests.fakes.fake_device import set_weight
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import Ask, EngineFaultError, Facts, opencoti
from tests.fakes.fake_room import set_expendable
from tests.fakes.scripted_chat import Brain, Said
from tests.fakes.toy_tokens import TemplateError, render

COMPLETIONS = ("/completion", "/completions", "/v1/completions")
PAGES = ("/slots", "/props", "/metrics", "/v1/models")
LOOKS_S = 0.01
CHATS = ("/v1/chat/completions", "/chat/completions")


class QuietServer(uvicorn.Server):
    """A server that leaves signals alone, and ends as soon as it may; uvicorn takes two tenths of a second."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await sleep(LOOKS_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(0.1 if self.force_exit else self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:
                    await sleep(LOOKS_S)
                await asyncio.gather(*(server.wait_closed() for server in self.servers))
        except TimeoutError:
            for task in () if self.force_exit else state.tasks:
                task.cancel()


class FakeEngineServer:
    """A served FakeEngine."""

    def __init__(self, engine: FakeEngine, path: Path) -> None:
        self.engine = engine
        self.path = path
        self.calls: list[tuple[str, str]] = []
        self.seen_bodies: list[bytes] = []
        self.pages: dict[str, tuple[int, str, bytes]] = {"/v1/models": (200, "application/json", b'{"data":[{"id":"toy.gguf"}]}')}
        """What public pages answer: status, content type and body; the engine has no others."""
        self.brain: Brain | None = None
        """What chats are answered, in the form of the real engine; without it, toy words in a form of its own."""
        self.metrics_door = asyncio.Event()
        """Who asks for `/metrics` waits until it is set, which it is."""
        self.metrics_door.set()
        self._server: QuietServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen."""
        self.engine.listeners_stop = False
        self.path.unlink(missing_ok=True)
        config = uvicorn.Config(
            self.app(), uds=str(self.path), log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        self._server = QuietServer(config)
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Cut everything and stop."""
        if self._server is None or self._task is None:
            return
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self.engine.listeners_stop = True
        self.engine.go()
        await self.engine.rouse()
        self._server.should_exit = True
        self._server.force_exit = True
        await self._task
        self._server = self._task = None
        self.path.unlink(missing_ok=True)

    async def crash(self) -> None:
        """Die, as far as anyone outside can tell."""
        await self.stop()

    async def restart(self) -> None:
        """Come back with a new context."""
        self.engine.boot()
        await self.start()

    def app(self) -> Starlette:
        """All of it as an application, for who serves it himself."""
        post = [Route(path, self._complete, methods=["POST"]) for path in COMPLETIONS]
        post += [Route(path, self._chat, methods=["POST"]) for path in CHATS]
        texts = {"/detokenize": self._detokenize, "/tokenize": self._tokenize, "/apply-template": self._template}
        post += [Route(path, page, methods=["POST"]) for path, page in texts.items()]
        verbs = [
            Route("/_polykv/v1/hello", self._hello),
            Route("/_polykv/v1/state", self._state),
            Route("/_polykv/v1/events", self._events),
            Route("/_polykv/v1/seqs", self._make, methods=["POST"]),
            Route("/_polykv/v1/expendable", self._expendable, methods=["POST"]),
            Route("/_polykv/v1/gpu", self._gpu, methods=["POST"]),
            Route("/_polykv/v1/seqs/restore", self._restore, methods=["POST"]),
            Route("/_polykv/v1/seqs/{ref}/tokens", self._tokens),
            Route("/_polykv/v1/seqs/{ref}/save", self._save, methods=["POST"]),
            Route("/_polykv/v1/seqs/{ref}", self._free, methods=["DELETE"]),
            Route("/_polykv/v1/sessions/{n:int}", self._end_session, methods=["DELETE"]),
        ]
        app = Starlette(
            routes=[*post, *verbs, Route("/health", self._health), *(Route(path, self._page) for path in PAGES)],
            exception_handlers={EngineFaultError: _fault, 404: _not_found},
        )
        app.add_middleware(_KeyMiddleware, server=self)
        return app

    async def _health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _page(self, request: Request) -> Response:
        """A page as a test wants it."""
        if request.url.path == "/metrics":
            await self.metrics_door.wait()
        if request.url.path not in self.pages:
            raise EngineFaultError(501, "not_supported_error", f"This server does not support {request.url.path}.")
        status, kind, body = self.pages[request.url.path]
        return Response(body, status, headers={"content-type": kind, "process-start-time-unix": "1700000000"})

    async def _hello(self, _request: Request) -> Response:
        self.engine.maybe_fail("hello")
        return JSONResponse(self.engine.hello())

    async def _state(self, _request: Request) -> Response:
        self.engine.maybe_fail("state")
        return JSONResponse(self.engine.state())

    async def _events(self, request: Request) -> Response:
        async def lines() -> AsyncIterator[str]:
            interval = request.query_params.get("interval_ms")
            last_id = request.headers.get("last-event-id")
            async for event_id, kind, data in self.engine.listen(last_id, None if interval is None else int(interval) / 1000):
                named = f"id: {event_id}\n" if event_id else ""
                yield f"{named}event: {kind}\ndata: {json.dumps(data)}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def _make(self, request: Request) -> Response:
        body = await request.json()
        self.engine.check_make(body)

        async def lines() -> AsyncIterator[str]:
            async for kind, data in self.engine.make(body):
                yield f"event: {kind}\ndata: {json.dumps(data)}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def _tokens(self, request: Request) -> Response:
        seq = self.engine.seq(request.path_params["ref"])
        if seq is None:
            raise EngineFaultError(410, "stale_seq", "this sequence is gone")
        return Response(struct.pack(f"<{len(seq.tokens)}i", *seq.tokens), media_type="application/octet-stream")

    async def _save(self, request: Request) -> Response:
        return JSONResponse(await fake_files.save(self.engine, request.path_params["ref"], await request.json()))

    async def _restore(self, request: Request) -> Response:
        return JSONResponse(await fake_files.restore(self.engine, await request.json()))

    async def _gpu(self, request: Request) -> Response:
        return JSONResponse(set_weight(self.engine, await request.json()))

    async def _expendable(self, request: Request) -> Response:
        return JSONResponse(set_expendable(self.engine, await request.json()))

    async def _free(self, request: Request) -> Response:
        return JSONResponse(self.engine.free(request.path_params["ref"]))

    async def _end_session(self, request: Request) -> Response:
        return JSONResponse(await self.engine.end_session(request.path_params["n"]))

    async def _complete(self, request: Request) -> Response:
        body = await self._body(request)
        prompt = body.get("prompt")
        if prompt is None:
            raise EngineFaultError(400, "invalid_request_error", '"prompt" is missing')
        many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = prompt if many else [prompt]
        tokens = [one if isinstance(one, list) else self.engine.tokenizer.encode(one) for one in prompts]
        return await self._generate(request, body, tokens, chat=False)

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        if not body.get("messages"):
            raise EngineFaultError(400, "invalid_request_error", "'messages' is required")
        try:
            text = render(body["messages"], body.get("tools"), body.get("chat_template_kwargs") or {})
        except TemplateError as error:
            raise EngineFaultError(400, "invalid_request_error", str(error)) from error
        return await self._generate(request, body, [self.engine.tokenizer.encode(text)], chat=True)

    async def _detokenize(self, request: Request) -> Response:
        return JSONResponse({"content": self.engine.tokenizer.decode((await request.json())["tokens"])})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        return JSONResponse({"tokens": self.engine.tokenizer.encode(body["content"], bos=body.get("add_special", False))})

    async def _template(self, request: Request) -> Response:
        body = await request.json()
        return JSONResponse({"prompt": render(body["messages"], body.get("tools"), body.get("chat_template_kwargs") or {})})

    async def _body(self, request: Request) -> dict:
        raw = await request.body()
        self.seen_bodies.append(raw)
        try:
            return json.loads(raw)
        except ValueError:
            raise EngineFaultError(400, "invalid_request_error", "the body is not JSON") from None

    async def _generate(self, request: Request, body: dict, prompts: list[list[int]], *, chat: bool) -> Response:
        ours = request.headers if self._keyed(request) else {}
        if ours.get("x-polykv-dry") == "tokens":
            self.engine.maybe_fail("dry")
            raw = b"".join(struct.pack(f"<I{len(p)}i", len(p), *p) for p in prompts)
            counts = ",".join(str(len(p)) for p in prompts)
            return Response(raw, media_type="application/octet-stream", headers={"x-polykv-counts": counts})
        self.engine.maybe_fail("complete")
        n = body.get("n_predict", body.get("max_tokens", 4))
        if any(len(prompt) >= self.engine.n_ctx for prompt in prompts):
            raise EngineFaultError(400, "exceed_context_size_error", "the request exceeds the available context size")
        asks = [
            Ask(
                tokens=prompt,
                n_predict=n,
                index=index,
                req=int(ours.get("x-polykv-req", 0)),
                session=int(ours.get("x-polykv-session", 0)) if index == 0 else 0,
                seq=ours.get("x-polykv-seq"),
                max_shared=int(ours.get("x-polykv-shared", 0)),
                cache_prompt=body.get("cache_prompt", True),
                id_slot=body.get("id_slot"),
                n_probs=body.get("n_probs", 0),
            )
            for index, prompt in enumerate(prompts * body.get("n", 1))
        ]
        brain = self.brain if chat else None
        said = Said(body, brain(body)) if brain is not None else None
        if body.get("stream"):
            return await self._streamed(asks[0], ours, chat=chat, said=said)
        return await self._whole(request, asks, ours, chat=chat, said=said)

    async def _whole(self, request: Request, asks: list[Ask], ours: object, *, chat: bool, said: Said | None) -> Response:
        work = asyncio.ensure_future(asyncio.gather(*[self._run(ask) for ask in asks]))
        leaver = asyncio.ensure_future(_left(request))
        await asyncio.wait({work, leaver}, return_when=asyncio.FIRST_COMPLETED)
        leaver.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return Response(status_code=499)
        results = work.result()
        replies = [
            self._reply(ask, facts, tokens, reason, ours, chat=chat)
            for ask, (facts, tokens, reason) in zip(asks, results, strict=True)
        ]
        if said is not None:
            replies = [said.whole(results[0][0], replies[0])]
        return JSONResponse(replies[0] if len(replies) == 1 else replies, headers=_facts_headers(results[0][0], ours))

    async def _run(self, ask: Ask) -> tuple[Facts, list[int], str]:
        facts, tokens, reason = None, [], "error"
        async with contextlib.aclosing(self.engine.run(ask)) as steps:
            async for step in steps:
                if isinstance(step, Facts):
                    facts = step
                elif isinstance(step, int):
                    tokens.append(step)
                else:
                    reason = step
        assert facts is not None
        return facts, tokens, reason

    async def _streamed(self, ask: Ask, ours: object, *, chat: bool, said: Said | None) -> Response:
        steps = self.engine.run(ask)
        facts = await anext(steps)
        assert isinstance(facts, Facts)

        async def lines() -> AsyncIterator[str]:
            tokens: list[int] = []
            async with contextlib.aclosing(steps):
                async for step in steps:
                    if isinstance(step, int):
                        tokens.append(step)
                        text = self.engine.tokenizer.decode([step])
                        chunk = {"choices": [{"index": 0, "delta": {"content": text}}]} if chat else {"content": text}
                        if said is None:
                            yield f"data: {json.dumps(chunk)}\n\n"
                    else:
                        last = self._reply(ask, facts, tokens, str(step), ours, chat=chat)
                        if chat:
                            last["choices"] = [{"index": 0, "delta": {}, "finish_reason": step}]
                        for event in [last] if said is None else said.events(facts, last):
                            yield f"data: {json.dumps(event)}\n\n"
                        yield "data: [DONE]\n\n" if said is not None else ""

        return StreamingResponse(lines(), media_type="text/event-stream", headers=_facts_headers(facts, ours))

    def _reply(self, ask: Ask, facts: Facts, tokens: list[int], reason: str, ours: object, *, chat: bool) -> dict:
        text = self.engine.tokenizer.decode(tokens)
        reply = {"choices": [{"message": {"role": "assistant", "content": text}}]} if chat else {"content": text}
        reply["timings"] = {"cache_n": facts.n_cached, "prompt_n": facts.n_prompt - facts.n_cached, "predicted_n": len(tokens)}
        reply["stop_type"] = reason
        if facts.candidates:  # of the first token; the real engine lists them for every one
            reply["completion_probabilities"] = [{"top_logprobs": facts.candidates}]
        if ask.req:
            n_left = self.engine.n_ctx - facts.n_prompt - len(tokens)
            reply["opencoti"] = opencoti(facts, ours.get("x-polykv-echo"), named=ask.seq is not None, n_left=n_left)
        return reply

    def _keyed(self, request: Request) -> bool:
        return self.engine.has_verbs and request.headers.get("x-polykv-key") == self.engine.key


class _KeyMiddleware:
    """The API key first, then the private key: without it a verb is a page that does not exist."""

    def __init__(self, app: object, server: FakeEngineServer) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: dict, receive: object, send: object) -> None:
        if scope["type"] != "http":
            return
        engine = self._server.engine
        headers = dict(scope["headers"])
        self._server.calls.append((scope["method"], scope["path"]))
        taken = [f"Bearer {key}".encode() for key in engine.api_key.split(",")] if engine.api_key else []
        if taken and headers.get(b"authorization") not in taken and scope["path"] != "/health":
            fault = EngineFaultError(401, "authentication_error", "Invalid API Key")
            await _answer(fault)(scope, receive, send)
        elif scope["path"].startswith("/_polykv/") and not (
            engine.has_verbs and headers.get(b"x-polykv-key") == engine.key.encode()
        ):
            await _answer(EngineFaultError(404, "not_found_error", "File Not Found"))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _facts_headers(facts: Facts, ours: object) -> dict[str, str]:
    if not ours.get("x-polykv-req"):
        return {}
    headers = {"x-polykv-slot": str(facts.slot), "x-polykv-cached": str(facts.n_cached), "x-polykv-shared": str(facts.n_shared)}
    return {**headers, "x-polykv-miss": facts.miss} if facts.miss else headers


def _answer(fault: EngineFaultError) -> Response:
    error = {"code": fault.status, "message": fault.message, "type": fault.type, "param": fault.param}
    return JSONResponse({"error": error}, status_code=fault.status)


async def _fault(_request: Request, fault: Exception) -> Response:
    assert isinstance(fault, EngineFaultError)
    return _answer(fault)


async def _not_found(_request: Request, _error: Exception) -> Response:
    return _answer(EngineFaultError(404, "not_found_error", "File Not Found"))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
