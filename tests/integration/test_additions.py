"""`/slots` and `/props` through the relay: the engine's bytes with ours at their ends, or the engine's bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from polykv_proxy.api.relay import held
from polykv_proxy.ports import EngineAddress
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, relayed, rig

SLOTS = b'[{"id": 0, "n_ctx": 4096, "temp": 0.800000011920929},\n {"id":1,"is_processing":false}, {"id":2}, {"id":3}]'
PROPS = '{"total_slots": 4, "model_path": "/m\\u00fc.gguf", "chat_template": "Grüße"}\n'.encode()
JSON = "application/json; charset=utf-8"
OURS = {"pool_id", "session_id", "tps_ewma", "ctx_used", "ctx_total", "ctx_headroom_tokens"}


async def heard(proxy: Rig) -> None:
    """Until the counters have told that all slots rest."""
    async with asyncio.timeout(20):
        while any(slot.state != "idle" for slot in proxy.runtime.hub.telemetry.live.state.slots):  # type: ignore[union-attr]
            await asyncio.sleep(0.005)


def without(extra: set[str], page: list[dict]) -> list[dict]:
    return [{key: value for key, value in slot.items() if key not in extra} for slot in page]


async def test_slots_say_whose_they_are_and_how_fast(tmp_path: Path) -> None:
    """Pool, session, speed and room of each slot; all that the engine says is there as it was; an unused slot has nulls."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        proxy.server.pages["/slots"] = (200, JSON, SLOTS)
        pool = await proxy.pool(prompt="one two three four")
        body = {"prompt": "one two three four five", "pool_id": pool["pool_id"], "session_id": "a", "n_predict": 40}
        await client.post("/completion", json=body)
        await proxy.settle()
        await heard(proxy)
        reply = await client.get("/slots")
        page = reply.json()
        assert without(OURS, page) == json.loads(SLOTS)
        assert reply.content.startswith(b'[{"id": 0, "n_ctx": 4096, "temp": 0.800000011920929,"pool_id":1,"session_id":"a",')
        assert page[0]["tps_ewma"] == pytest.approx(1000)
        assert page[0]["ctx_used"] + page[0]["ctx_headroom_tokens"] == page[0]["ctx_total"] == 4096
        assert (page[3]["pool_id"], page[3]["session_id"], page[3]["tps_ewma"], page[3]["ctx_used"]) == (None, None, None, 0)
        assert int(reply.headers["content-length"]) == len(reply.content)


async def test_a_request_without_a_session_leaves_its_figure_with_its_slot(tmp_path: Path) -> None:
    """The last figure of a slot stays until somebody else has it."""
    async with rig(tmp_path, FakeEngine(n_slots=1)) as proxy, relayed(proxy) as (_, client):
        proxy.server.pages["/slots"] = (200, JSON, b'[{"id":0}]')
        await client.post("/completion", json={"prompt": "one two", "n_predict": 40})
        await heard(proxy)
        (slot,) = (await client.get("/slots")).json()
        assert (slot["session_id"], slot["pool_id"]) == (None, None)
        assert slot["tps_ewma"] == pytest.approx(1000)


async def test_props_say_how_we_are_configured(tmp_path: Path) -> None:
    """One object at the end of the engine's."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        proxy.server.pages["/props"] = (200, JSON, PROPS)
        reply = await client.get("/props?model=x")
        assert reply.content.startswith(PROPS.rstrip()[:-1])
        ours = reply.json()["opencoti"]["polykv"]
        assert (ours["max_pools"], ours["prefix_sharing"], ours["session_ttl_s"]) == (4, "any", 600.0)
        assert ours["admission"]["target_tps_per_session"] is None


PLAIN = [
    ("/slots", (501, JSON, b'{"error":{"code":501}}')),
    ("/slots", (401, JSON, b'{"error":{"code":401}}')),
    ("/slots", (200, JSON, b'{"not":"an array"}')),
    ("/slots", (200, JSON, b"[{]")),
    ("/slots", (200, JSON, b"")),
    ("/slots", (200, "text/plain", SLOTS)),
    ("/props", (200, JSON, b'[{"no":"object"}]')),
    ("/props", (200, JSON, b'{"text":"\xff"}')),
    ("/props", (503, JSON, PROPS)),
]


@pytest.mark.parametrize(("path", "page"), PLAIN)
async def test_what_is_not_the_page_that_we_know_goes_as_it_came(tmp_path: Path, path: str, page: tuple[int, str, bytes]) -> None:
    """Errors, other types, broken and unexpected JSON: the engine's status, type and bytes."""
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        proxy.server.pages[path] = page
        reply = await client.get(path)
        assert (reply.status_code, reply.headers["content-type"], reply.content) == page


async def test_a_page_that_is_too_long_goes_as_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not kept in memory: what was held goes on, then the rest."""
    monkeypatch.setattr(held, "LIMIT", 1000)
    page = json.dumps({"text": "x" * 300_000}).encode()
    async with rig(tmp_path) as proxy, relayed(proxy) as (_, client):
        proxy.server.pages["/props"] = (200, JSON, page)
        assert (await client.get("/props")).content == page


async def test_other_methods_and_relay_only_add_nothing(tmp_path: Path) -> None:
    """HEAD is the engine's; so is everything with `--off`, and of an engine without pools."""
    async with rig(tmp_path) as proxy:
        proxy.server.pages["/slots"] = (200, JSON, SLOTS)
        async with relayed(proxy) as (_, client):
            assert (await client.head("/slots")).headers["content-length"] == str(len(SLOTS))
        async with relayed(proxy, gated=False) as (_, client):
            assert (await client.get("/slots")).content == SLOTS
    engine = FakeEngine()
    engine.has_verbs = False
    async with rig(tmp_path, engine) as proxy, relayed(proxy) as (_, client):
        proxy.server.pages["/slots"] = (200, JSON, SLOTS)
        assert (await client.get("/slots")).content == SLOTS


async def test_an_engine_that_dies_in_the_middle_of_a_page_is_a_503(tmp_path: Path) -> None:
    """Nothing half is sent."""
    async with rig(tmp_path) as proxy:
        half = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n[{"id":0}'

        async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(half)
            await writer.drain()
            writer.close()

        path = tmp_path / "half.sock"
        server = await asyncio.start_unix_server(serve, path)
        async with relayed(proxy) as (relay, client):
            relay.pool.open(EngineAddress(uds=str(path)))
            reply: httpx.Response = await client.get("/slots")
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
        server.close()
        await server.wait_closed()
