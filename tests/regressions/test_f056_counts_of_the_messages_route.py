"""F056: the messages route says what was read from the pool in its first event, in order, and we count each figure once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from polykv_proxy.ports import EngineAddress
from tests.fakes.product import Product, product
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import END, SSE_HEAD, Stub, chunk
from tests.langgraph.real import TEMPLATE
from tests.models import tiny_model

SYSTEM = (
    "You are a terse assistant who knows a great deal about ships, harbours and the open sea. Ask the harbour before you answer."
)
TOOL = {"name": "harbour", "input_schema": {"type": "object", "properties": {"depth": {"type": "integer"}}}}
BODY: dict[str, Any] = {
    "model": "m", "max_tokens": 12, "temperature": 0, "stream": True, "system": SYSTEM, "tools": [TOOL],
    "messages": [{"role": "user", "content": "Where is the keel?"}],
}  # fmt: skip
CALL = [
    ("message_start", {"message": {"usage": {"cache_read_input_tokens": 80, "input_tokens": 9, "output_tokens": 0}}}),
    ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
    ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "I ask."}}),
    ("content_block_stop", {"index": 0}),
    ("content_block_start", {"index": 1, "content_block": {"type": "tool_use", "id": "t1", "name": "harbour", "input": {}}}),
    ("content_block_delta", {"index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"depth":'}}),
    ("content_block_delta", {"index": 1, "delta": {"type": "input_json_delta", "partial_json": "7}"}}),
    ("content_block_stop", {"index": 1}),
    ("message_delta", {"delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 17}}),
    ("message_stop", {}),
]  # fmt: skip
"""A tool call as the engine words it: a tiny model makes none."""
DRAWN = re.compile(r'"id":"[^"]*"')
"""Ids are drawn anew for every request."""


def stream(proxy: Product, client: httpx.Client, **more: object) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """The text of a stream without its ids, and its events. The slot holds nothing when it begins."""
    proxy.settled()
    proxy.engine.http.post("/slots/0?action=erase").raise_for_status()
    reply = client.post("/v1/messages", json={**BODY, **more})
    assert reply.status_code == 200, reply.text
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in reply.text.strip().split("\n\n")]
    return DRAWN.sub('"id":""', reply.text), [(block["event"], json.loads(block["data"])) for block in blocks]


def in_order(events: list[tuple[str, dict[str, Any]]]) -> None:
    """Start; then blocks, each begun, added to and stopped; then the message's delta and its stop."""
    names = " ".join(name for name, _ in events)
    block = r"content_block_start (?:content_block_delta )*content_block_stop "
    assert re.fullmatch(rf"message_start (?:{block})+message_delta message_stop", names), names


def counts(events: list[tuple[str, dict[str, Any]]]) -> tuple[int, int, int]:
    """Computed and cached tokens of the prompt by the first event, tokens of the answer by the last that has any."""
    first = events[0][1]["message"]["usage"]
    outputs = [data["usage"]["output_tokens"] for name, data in events if name == "message_delta"]
    return first["input_tokens"], first["cache_read_input_tokens"], outputs[-1]


def totals(proxy: Product) -> tuple[int, int, int]:
    """What the engine has counted over all its slots: prompt tokens computed, cached, and tokens decoded."""
    proxy.settled()
    each = [slot["totals"] for slot in proxy.engine.state()["slots"]]
    return tuple(sum(one[key] for one in each) for key in ("n_prompt", "n_cached", "n_decoded"))  # type: ignore[return-value]


@pytest.mark.engine
def test_cold_and_warm(engine_path: Path, tmp_path: Path) -> None:
    """With tools: through the proxy as from the engine; attached, the first event says how much came from the pool."""
    args = ["-c", 4096, "-np", 1, "--jinja", "--chat-template-file", TEMPLATE, "--cache-ram", 0, "--slot-save-path", tmp_path]
    with product(engine_path, tiny_model("full"), tmp_path, args=args) as proxy:
        direct, _ = stream(proxy, proxy.engine.http)
        through, cold = stream(proxy, proxy.http)
        assert through == direct
        in_order(cold)
        n_input, n_cached, n_output = counts(cold)
        assert n_cached == 0

        pool = proxy.pool(messages=[{"role": "system", "content": SYSTEM}], tools=[openai_form(TOOL)], name="p")
        before = totals(proxy)
        _, warm = stream(proxy, proxy.http, pool_id="p", session_id="s")
        in_order(warm)
        assert counts(warm) == (n_input - pool["prefix_len"], pool["prefix_len"], n_output)
        grown = [after - then for after, then in zip(totals(proxy), before, strict=True)]
        assert grown == [n_input - pool["prefix_len"], pool["prefix_len"], n_output]
        shown = proxy.get("/polykv/pools/p")
        assert [shown[key] for key in ("n_queries", "n_hits", "n_tokens_shared")] == [1, 1, pool["prefix_len"]]
        assert proxy.get("/polykv/sessions/s")["n_turns"] == 1


@pytest.mark.parametrize("size", [1, 61])
def test_a_tool_call_crosses_unchanged(size: int) -> None:
    """In pieces of any size, on the route whose errors have a form of their own."""
    whole = "".join(f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n" for name, data in CALL).encode()
    steps = [SSE_HEAD, *(chunk(whole[at : at + size]) for at in range(0, len(whole), size)), END]
    with Stub(lambda _: steps) as stub, RelayRig(EngineAddress(port=stub.port)) as relay:
        got = relay.send(request(b"POST", b"/v1/messages", json.dumps(BODY).encode()))
    assert (got.body, got.complete) == (whole, True)
    in_order(CALL)


def openai_form(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
