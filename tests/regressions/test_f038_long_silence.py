"""F038: however long the engine is silent, a healthy request is not cut by us, and nothing is put into its bytes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
from langchain_openai import ChatOpenAI

from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import END, SSE_HEAD, Script, Stub, chunk, reply
from tests.lengths import length

SILENCE_S = length(0.5, 40.0)
FIRST, SECOND = b'data: {"n":1}\n\n', b'data: {"n":2}\n\n'
OPEN, CLOSE = b"data: {\n", b"data: }\n\n"

SCRIPTS: dict[bytes, Script] = {
    b"/before-the-head": [SILENCE_S, SSE_HEAD, chunk(FIRST), END],
    b"/before-the-first-event": [SSE_HEAD, SILENCE_S, chunk(FIRST), END],
    b"/between-two-events": [SSE_HEAD, chunk(FIRST), SILENCE_S, chunk(SECOND), END],
    b"/in-an-event": [SSE_HEAD, chunk(OPEN), SILENCE_S, chunk(CLOSE), END],
    b"/with-comments": [SSE_HEAD, chunk(b": one\n\n"), SILENCE_S, chunk(b":\n\n" + FIRST), END],
    b"/no-stream": [SILENCE_S, *reply(b'{"whole":1}')],
    b"/no-stream-in-a-body": [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab", SILENCE_S, b"cd"],
}
WHOLE = {
    b"/before-the-head": FIRST,
    b"/before-the-first-event": FIRST,
    b"/between-two-events": FIRST + SECOND,
    b"/in-an-event": OPEN + CLOSE,
    b"/with-comments": b": one\n\n:\n\n" + FIRST,
    b"/no-stream": b'{"whole":1}',
    b"/no-stream-in-a-body": b"abcd",
}


def test_silence_ends_nothing_and_is_filled_with_nothing() -> None:
    """Before the head, before and between events, inside one, and in replies that are no streams, all at the same time."""
    with Stub(lambda seen: SCRIPTS[seen.target]) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:

        def ask(target: bytes) -> bytes:
            with rig.connect() as client:
                client.sock.settimeout(SILENCE_S + 60)
                client.send(request(b"POST", target, b"{}"))
                got = client.reply()
                assert got.complete
                return got.body

        with ThreadPoolExecutor(len(SCRIPTS)) as threads:
            assert dict(zip(SCRIPTS, threads.map(ask, SCRIPTS), strict=True)) == WHOLE
        assert len(stub.requests) == len(SCRIPTS)


def test_clients_read_past_comments() -> None:
    """Comments, as streams get them that wait for their turn: OpenAI's client and LangChain read the answer around them."""
    words = ["the ", "keel"]
    choices = [{"index": 0, "delta": {"content": word}, "finish_reason": None} for word in words]
    pieces = [{"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [one]} for one in choices]
    events = [f": held\n\n:\n\ndata: {json.dumps(piece)}\n\n".encode() for piece in pieces]
    script = [SSE_HEAD, *[chunk(event) for event in events], chunk(b": held\n\ndata: [DONE]\n\n"), END]
    with Stub(lambda _: script) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, httpx.Client(trust_env=False) as http:
        base = {"base_url": f"http://127.0.0.1:{rig.port}/v1", "api_key": "none"}
        client = openai.OpenAI(**base, http_client=http)
        asked = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
        assert [piece.choices[0].delta.content for piece in asked] == words
        model = ChatOpenAI(**base, model="m", http_client=http)
        assert "".join(str(piece.content) for piece in model.stream("x")) == "".join(words)
