"""Embeddings, rerank and audio together with a pool: a clear 400 instead of a pool that is silently not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import relayed, rig

ROUTES = ["/embedding", "/v1/embeddings", "/rerank", "/v1/reranking", "/v1/audio/transcriptions"]


@pytest.mark.parametrize("route", ROUTES)
async def test_a_pool_named_by_header_is_refused_by_name(tmp_path: Path, route: str) -> None:
    """400 with the header as `param`, in any case, before the engine is asked; the connection goes on."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        got = await client.post(route, json={"input": "x" * 100_000}, headers={"X-Pool-ID": "agents"})
        assert got.status_code == 400
        error = got.json()["error"]
        assert (error["code"], error["type"], error["param"]) == ("invalid_request", "invalid_request_error", "x-pool-id")
        assert ("POST", route) not in proxy.server.calls
        assert (await client.post("/completion", json={"prompt": "a b", "n_predict": 1})).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"x-session-id": "s"}])
async def test_everything_else_stays_pure_relay(tmp_path: Path, headers: dict[str, str]) -> None:
    """Without the header these routes are the engine's, whatever their body says: here it does not know them."""
    async with rig(tmp_path, default_pool="agents") as proxy, relayed(proxy) as (_, client):
        await proxy.pool(prompt="a b c", name="agents")
        got = await client.post("/v1/embeddings", json={"input": "x", "pool_id": "agents"}, headers=headers)
        assert (got.status_code, got.json()["error"]["message"]) == (404, "File Not Found")
        assert ("POST", "/v1/embeddings") in proxy.server.calls
        assert not [name for name in got.headers if name.startswith("x-")]


@pytest.mark.parametrize("gated", [True, False])
async def test_without_pools_nothing_is_refused(tmp_path: Path, gated: bool) -> None:
    """In front of an engine without our verbs, and with --off, the header is just one more field on its way."""
    engine = FakeEngine()
    engine.has_verbs = not gated
    async with rig(tmp_path, engine) as proxy, relayed(proxy, gated=gated) as (_, client):
        got = await client.post("/v1/embeddings", json={"input": "x"}, headers={"x-pool-id": "agents"})
        assert got.status_code == 404
        assert ("POST", "/v1/embeddings") in proxy.server.calls
