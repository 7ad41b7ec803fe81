"""The whole proxy in front of a real engine without pools: what the official client and curl see is what the engine says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.fakes.proxy_process import Served

pytestmark = pytest.mark.engine

SAY = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def served(twin_path: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(twin_path, smollm2, tmp_path_factory.mktemp("proxy")) as proxy:
        yield proxy
        engine = psutil.Process(proxy.health["pid"])
        assert proxy.stop() == 0
        assert not engine.is_running()
        assert not Path(proxy.socket).exists()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(base_url=served.url + "/v1", api_key="none", http_client=http) as made,
    ):
        yield made


def _direct(served: Served) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=served.socket), base_url="http://engine", timeout=120)


def _through(served: Served) -> httpx.Client:
    return httpx.Client(base_url=served.url, trust_env=False, timeout=120)


def test_start_up_says_what_it_serves(served: Served) -> None:
    """The start names the model, context and slots, one line to try, and once that pools are off and why."""
    assert "context 2048 tokens per slot, 4 slots" in served.said
    assert "curl http://" in served.said
    assert len(re.findall(r"pools are off", served.said)) == 1


def test_chat_and_streaming_agree(client: openai.OpenAI) -> None:
    """The official client gets an answer, and the pieces of a stream make up the same answer with its usage."""
    whole = client.chat.completions.create(model="m", messages=SAY, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model="m", messages=SAY, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for piece in stream:
        text += (piece.choices[0].delta.content or "") if piece.choices else ""
        usage = piece.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_grammar_reaches_the_engine(client: openai.OpenAI) -> None:
    """An answer under a JSON schema obeys it."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo"]}}, "required": ["city"]}
    got = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "Weather in Oslo?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
        max_tokens=40,
        temperature=0,
    )
    assert json.loads(got.choices[0].message.content or "") == {"city": "Oslo"}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_cross_unchanged(served: Served, client: openai.OpenAI, choice: str) -> None:
    """What the engine makes of tools, calls or text, is the same through the proxy as from the engine itself."""
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
    ask = {
        "model": "m",
        "messages": [{"role": "user", "content": "Weather in Oslo?"}],
        "tools": [tool],
        "tool_choice": choice,
        "max_tokens": 12,
        "temperature": 0,
    }
    with _direct(served) as http, openai.OpenAI(base_url="http://engine/v1", api_key="none", http_client=http) as straight:
        want, got = straight.chat.completions.create(**ask), client.chat.completions.create(**ask)
    assert got.choices[0].message == want.choices[0].message
    assert got.choices[0].finish_reason == want.choices[0].finish_reason


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("GET", "/props", None),
        ("GET", "/nowhere", None),
        ("HEAD", "/health", None),
        ("OPTIONS", "/v1/chat/completions", None),
        ("PUT", "/v1/chat/completions", b"{}"),
        ("DELETE", "/nowhere", None),
        ("POST", "/v1/chat/completions", b"{not json"),
        ("POST", "/tokenize", b'{"content":"h\\u00e9llo"}'),
        ("POST", "/apply-template", b'{"messages":[{"role":"user","content":"x"}]}'),
    ],
)
def test_answers_equal_direct_ones(served: Served, method: str, path: str, body: bytes | None) -> None:
    """Status, fields and body of a relayed answer are those of the engine; only fields of one connection differ."""
    with _direct(served) as direct, _through(served) as through:
        ask = {"content": body, "headers": {"Origin": "http://app.example", "Content-Type": "application/json"}}
        want, got = direct.request(method, path, **ask), through.request(method, path, **ask)
        hop = {"keep-alive", "connection", "transfer-encoding"}
        fields = [
            [(name.lower(), value) for name, value in one.headers.multi_items() if name.lower() not in hop] for one in (want, got)
        ]
        assert (got.status_code, got.reason_phrase) == (want.status_code, want.reason_phrase)
        assert fields[1] == fields[0]
        assert got.content == want.content


def test_a_greedy_stream_is_byte_equal_but_for_ids_and_clocks(served: Served) -> None:
    """Two runs of one streamed completion, direct and through, differ in nothing that is not drawn or measured anew."""

    def run(client: httpx.Client) -> list[object]:
        body = {"prompt": "One, two, three,", "n_predict": 8, "temperature": 0, "stream": True, "cache_prompt": False, "id_slot": 0}
        text = client.post("/completion", json=body).text
        assert text.endswith("\n\n")
        events = [json.loads(part.removeprefix("data: ")) for part in text.strip().split("\n\n")]
        for event in events:
            event.pop("timings", None)
        return events

    with _direct(served) as direct, _through(served) as through:
        assert run(through) == run(direct)


def test_our_verbs_answer_501_with_the_remedy(served: Served) -> None:
    """Without the pool protocol in the engine, pools are a clear 501, private verbs a 404, and health says why."""
    with _through(served) as through:
        refused = through.post("/polykv/pools", json={"prompt": "x"})
        assert refused.status_code == 501
        assert "scripts/build_engine.sh" in refused.json()["error"]["message"]
        assert through.get("/_polykv/v1/hello").status_code == 404
        health = through.get("/polykv/health").json()
        assert health["state"] == "ready"
        assert health["pools"]["state"] == "off"


def test_a_second_proxy_on_the_port_refuses_before_it_starts_anything(served: Served, twin_path: Path, smollm2: Path) -> None:
    """A port in use is one line and exit code 2."""
    port = served.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [sys.executable, "-m", "polykv_proxy.cli", "--engine", str(twin_path), "-m", str(smollm2), "--port", port],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --host 127.0.0.1 --port")
    assert len(done.stderr.splitlines()) == 1


def test_a_broken_model_ends_the_start_with_the_engine_s_words(twin_path: Path, tmp_path: Path) -> None:
    """An engine that cannot load exits the proxy with code 1 and the reason."""
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16) + b"\0" * 64)
    done = subprocess.run(
        [sys.executable, "-m", "polykv_proxy.cli", "--engine", str(twin_path), "-m", str(model), "--port", "0", "--off"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "error: the engine exited with code" in done.stderr
    assert "broken.gguf" in done.stderr
