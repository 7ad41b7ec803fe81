"""Off means off: with no pools every byte is the unpatched engine's; with unused pools too, on plain attention with one layout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.driver import Engine
from tests.models import tiny_model

pytestmark = pytest.mark.engine

WORDS = "the river carries old letters from a town that nobody remembers and the boats are slow"

VOLATILE = re.compile(
    rb'"(created|prompt_ms|prompt_per_token_ms|prompt_per_second|predicted_ms|predicted_per_token_ms|predicted_per_second|created_at|completed_at)":[-0-9.e+]+'
    rb'|"(id|item_id|call_id)":"[^"]*"'
)
"""Times and random ids; everything else must be equal."""


def exchanges() -> list[tuple[str, str, dict[str, Any] | None]]:
    """A conversation over every generating route, streamed and not, with errors among them."""
    common: dict[str, Any] = {"temperature": 0, "seed": 1, "max_tokens": 12}
    chat = {"messages": [{"role": "system", "content": WORDS}, {"role": "user", "content": "go on"}], **common}
    result: list[tuple[str, str, dict[str, Any] | None]] = []
    for stream in (False, True):
        result += [
            (
                "POST",
                "/completion",
                {"prompt": WORDS, "n_predict": 12, "temperature": 0, "seed": 1, "stream": stream, "n_probs": 2},
            ),
            ("POST", "/v1/completions", {"prompt": [WORDS, WORDS[:30]], **common, "stream": stream}),
            ("POST", "/v1/chat/completions", {**chat, "stream": stream, "stream_options": {"include_usage": True}}),
            ("POST", "/v1/chat/completions", {**chat, "stream": stream, "n": 2}),
            ("POST", "/v1/responses", {"input": WORDS, "max_output_tokens": 12, "temperature": 0, "stream": stream}),
            ("POST", "/v1/messages", {"messages": [{"role": "user", "content": WORDS}], **common, "stream": stream}),
            ("POST", "/completion", {"prompt": list(range(300, 1400)), "n_predict": 2, "stream": stream}),
        ]
    return [
        *result,
        ("POST", "/completion", {"prompt": WORDS[:40], "n_predict": 8, "temperature": 0, "id_slot": 1}),
        ("POST", "/v1/chat/completions", {"messages": "wrong"}),
        ("POST", "/tokenize", {"content": WORDS}),
        ("GET", "/_polykv/v1/hello", None),
        ("GET", "/nothing/here", None),
        ("GET", "/v1/models", None),
    ]


def transcript(engine: Engine, headers: dict[str, str]) -> list[tuple[str, int, str, bytes]]:
    """What the engine answers to all of it, with volatile fields removed."""
    lines = []
    with engine.client({}) as client:
        for method, path, body in exchanges():
            reply = client.request(method, path, content=json.dumps(body).encode() if body else None, headers=headers)
            settle(client)
            lines.append((path, reply.status_code, reply.headers.get("content-type", ""), VOLATILE.sub(b"", reply.content)))
            own = [name for name in reply.headers if name.startswith("x-polykv")]
            assert own == []
    return lines


def settle(client: httpx.Client) -> None:
    """Wait until every slot is idle: a reply leaves before its slot is released, and the next choice of a slot depends on that."""
    while any(slot["is_processing"] for slot in client.get("/slots").json()):
        pass


@pytest.mark.parametrize("kind", ["full", "swa", "recurrent", "hybrid"])
@pytest.mark.parametrize("cache_ram", [0, 64])
def test_pools_off_is_byte_identical(engine_path: Path, twin_path: Path, kind: str, cache_ram: int) -> None:
    """`--polykv-max-pools 0`: on every memory class all routes answer what the unpatched engine answers."""
    args = ["-c", 1024, "-np", 2, "-t", 1, "--cache-ram", cache_ram]
    forged = {"x-polykv-req": "1", "x-polykv-seq": "2.1", "x-polykv-shared": "5", "x-polykv-session": "1", "x-polykv-dry": "tokens"}
    with Engine(twin_path, tiny_model(kind), args, env={"LLAMA_ARG_POLYKV_KEY": ""}) as twin:
        want = transcript(twin, {})
    with Engine(engine_path, tiny_model(kind), args, max_pools=0, env={"LLAMA_ARG_POLYKV_KEY": ""}) as engine:
        assert transcript(engine, {}) == want
    with Engine(engine_path, tiny_model(kind), args, max_pools=0) as engine:
        assert transcript(engine, forged) == want  # without the key the headers are nothing


@pytest.mark.parametrize("layout", ["-kvu", "--no-kv-unified"])
def test_pools_on_but_unused_is_byte_identical_on_plain_attention(engine_path: Path, twin_path: Path, layout: str) -> None:
    """With the same layout, pools that nobody uses change no byte on plain attention."""
    args = ["-c", 1024, "-np", 2, "-t", 1, layout, "--cache-ram", 64]
    with Engine(twin_path, tiny_model("full"), args) as twin:
        want = transcript(twin, {})
    with Engine(engine_path, tiny_model("full"), args, max_pools=8) as engine:
        assert transcript(engine, {}) == want


@pytest.mark.parametrize("layout", [(), ("--no-kv-unified",)])
def test_slot_context_is_kept(engine_path: Path, twin_path: Path, layout: tuple[str, ...]) -> None:
    """Pools make the cache unified, or larger where it is to be split: the context of one slot is the unpatched engine's."""
    for n_slots in (1, 3, 4):
        args = ["-c", 2048, "-np", n_slots, "-t", 1, *layout]
        with Engine(twin_path, tiny_model("full"), args) as twin:
            want = twin.http.get("/props").json()["default_generation_settings"]["n_ctx"]
        with Engine(engine_path, tiny_model("full"), args, max_pools=16) as engine:
            assert engine.http.get("/props").json()["default_generation_settings"]["n_ctx"] == want
            assert engine.hello()["kv"]["unified"] is not bool(layout)


def test_too_many_pools_are_refused_at_start(engine_path: Path) -> None:
    """More ids than a context has: the engine ends at once and names the number that fits."""
    with (
        pytest.raises(RuntimeError, match="use --polykv-max-pools 251"),
        Engine(engine_path, tiny_model("full"), ["-np", 4, "-t", 1], max_pools=300),
    ):
        pass


def test_an_engine_for_embeddings_alone_has_no_pools(engine_path: Path) -> None:
    """It starts (more sequence ids than stock's own can abort it there), says why, and embeds."""
    with Engine(engine_path, tiny_model("full"), ["--embedding", "--pooling", "mean", "-c", 512], max_pools=4) as engine:
        hello = engine.hello()
        assert (hello["max_pools"], "--embedding" in hello["prefix_sharing_why"]) == (0, True)
        assert engine.http.post("/v1/embeddings", json={"input": "one"}).status_code == 200
