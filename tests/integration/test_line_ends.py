"""JSON answers of ours end with a line end; what is streamed, empty, or a page is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.rig import relayed, rig


async def test_json_of_ours_ends_a_line(tmp_path: Path) -> None:
    """Answers, errors and replays alike, with the length that was announced; HEAD announces the same."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        order = {"tokens": [1, 2]}
        replies = [await client.post("/polykv/pools", json=order, headers={"idempotency-key": "k"}) for _ in "ab"]
        replies += [await client.get(path) for path in ("/polykv/pools", "/polykv/health", "/polykv/nothing", "/polykv/pools/9")]
        replies += [await client.post("/polykv/pools", content=b"{"), await client.request("PUT", "/polykv/pools")]
        for reply in replies:
            assert reply.content.endswith(b"}\n"), reply.url
            assert int(reply.headers["content-length"]) == len(reply.content)
        assert replies[0].content == replies[1].content
        head = await client.head("/polykv/pools/9")
        assert (head.headers["content-length"], head.content) == (replies[5].headers["content-length"], b"")


async def test_all_else_is_as_it_was(tmp_path: Path) -> None:
    """Streams, answers without a body, what the relay says, and the engine's own JSON."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        stream = await client.post("/polykv/pools?stream=1", json={"tokens": [1, 2]})
        assert stream.content.endswith(b"}\n\n")
        tag = (await client.get("/polykv/pools")).headers["etag"]
        assert (await client.get("/polykv/pools", headers={"if-none-match": tag})).content == b""
        assert (await client.options("/polykv/pools")).content == b""
        refused = await client.post("/completion", json={"prompt": [1], "pool_id": 9})
        assert refused.content.endswith(b"}")
        assert (await client.get("/health")).content == b'{"status":"ok"}'


async def test_a_fault_of_ours_ends_a_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 is made outside of all routes."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        monkeypatch.setattr(proxy.runtime, "look", None)
        reply = await client.get("/polykv/pools")
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
        assert reply.content.endswith(b"}\n")
