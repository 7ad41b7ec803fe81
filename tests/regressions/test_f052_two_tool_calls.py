"""F052: two tool calls in one stream, their arguments in many pieces: bytes cross unchanged, and clients see two whole calls."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI

from opencoti_langgraph import OpencotiChatModel
from polykv_proxy.ports import EngineAddress, Header, Plan, Refusal, RelayRequest, StreamStart
from tests.clients.node import script
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.scripted_chat import Answer, events
from tests.fakes.stub_engine import END, SSE_HEAD, Script, Seen, Stub, chunk
from tests.langgraph.conftest import no_traces  # noqa: F401 - pytest finds the fixture here

CALLS = [("weather", {"city": "Sào Paulo, 東京"}), ("weather", {"city": 'Zürich \U0001f327️ "old town"'})]
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}]}
ANSWER = Answer(calls=CALLS)
USAGE = {"prompt_tokens": 9, "completion_tokens": 8, "total_tokens": 17}
EXPECTED = [(f"call_{n}", name, json.dumps(args, ensure_ascii=False)) for n, (name, args) in enumerate(CALLS)]
STREAM = (
    "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events(ASK, ANSWER, USAGE, {})) + "data: [DONE]\n\n"
)


class Planned:
    """Every request has named a pool."""

    counts = False

    def concerns(self, request: RelayRequest) -> bool:
        return True

    async def count(self) -> Plan:
        raise AssertionError

    def objection(self, headers: Sequence[Header]) -> Refusal | None:
        return None

    async def plan(self, request: RelayRequest, waiting: StreamStart) -> Plan:
        return Plan([(b"x-polykv-seq", b"4.1")], lambda _status, _headers: [(b"x-pool-id", b"1")], lambda: None)


def pieces(_seen: Seen) -> Script:
    """In pieces of 50 bytes: they end inside characters and inside lines."""
    raw = STREAM.encode()
    return [SSE_HEAD, *(chunk(raw[at : at + 50]) for at in range(0, len(raw), 50)), END]


def by_openai(url: str) -> list[tuple[str, str, str]]:
    """Calls by id, name and arguments, put together as its documentation says."""
    calls: dict[int, list[str]] = {}
    with httpx.Client(trust_env=False) as http, openai.OpenAI(base_url=url, api_key="none", http_client=http) as client:
        for piece in client.chat.completions.create(**ASK, stream=True):
            for delta in piece.choices[0].delta.tool_calls or [] if piece.choices else []:
                call = calls.setdefault(delta.index, ["", "", ""])
                call[0] += delta.id or ""
                call[1] += (delta.function and delta.function.name) or ""
                call[2] += (delta.function and delta.function.arguments) or ""
    return [(call[0], call[1], call[2]) for _, call in sorted(calls.items())]


def by_openai_js(url: str) -> list[tuple[str, str, str]]:
    command = ["node", script("calls.mjs"), url, json.dumps(ASK)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return [tuple(call) for call in json.loads(done.stdout)]


def by_langchain(model: ChatOpenAI) -> list[tuple[str, str, str]]:
    whole: AIMessageChunk | None = None
    for piece in model.stream("Weather?"):
        whole = piece if whole is None else whole + piece
    assert whole is not None
    assert whole.invalid_tool_calls == []
    return [(call["id"] or "", call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in whole.tool_calls]


@pytest.mark.parametrize("planned", [False, True], ids=["plain", "with a pool"])
def test_clients_see_exactly_two_calls(planned: bool) -> None:
    """OpenAI's client, LangChain's model for it and ours: two calls, whole arguments, own ids; the bytes are the engine's."""
    with Stub(pieces) as stub, RelayRig(EngineAddress(port=stub.port), gate=Planned() if planned else None) as relay:
        got = relay.send(request(b"POST", b"/v1/chat/completions", json.dumps({**ASK, "stream": True}).encode()))
        assert got.body == STREAM.encode()
        assert got.header(b"x-pool-id") == ([b"1"] if planned else [])
        url = f"http://127.0.0.1:{relay.port}/v1"
        with httpx.Client(trust_env=False) as http:
            theirs = ChatOpenAI(base_url=url, api_key="none", model="m", http_client=http)  # type: ignore[arg-type]
            seen = [by_openai(url), by_langchain(theirs), by_langchain(OpencotiChatModel(base_url=url))]
        assert seen == [EXPECTED] * 3


def test_the_javascript_client_sees_them_too() -> None:
    """OpenAI's own, through the proxy."""
    with Stub(pieces) as stub, RelayRig(EngineAddress(port=stub.port)) as relay:
        assert by_openai_js(f"http://127.0.0.1:{relay.port}/v1") == EXPECTED
