"""`/polykv/tps` and `/polykv/events` over a socket: what watchers get, what many of them cost, and how they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx_sse
import pytest

from polykv_proxy.runtime import glance
from polykv_proxy.runtime.news import Topic
from tests.integration.rig import Rig, listening, rig

FIELDS = ["session_id", "pool_id", "tps_ewma", "ttft_ms", "state", "ctx_used", "ctx_total", "ctx_headroom_tokens"]


@asynccontextmanager
async def watching(proxy: Rig, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        listening(proxy.app, folder / "api.sock") as transport,
        httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=30) as client,
    ):
        yield client
        proxy.runtime.end_streams()


async def read(client: httpx.AsyncClient, path: str, n: int, headers: dict[str, str] | None = None) -> list[tuple[str, dict]]:
    """The first events of a stream, by name; fewer when it ends."""
    found = []
    async with asyncio.timeout(20), httpx_sse.aconnect_sse(client, "GET", path, headers=dict(headers or {})) as source:
        async for event in source.aiter_sse():
            if not event.data:  # a comment
                continue
            found.append((event.event, {**json.loads(event.data), "id": event.id}))
            if len(found) == n:
                break
    return found


async def test_once_is_plain_json_with_the_fields_of_the_page(tmp_path: Path) -> None:
    """Whole and sessions, finite or null; `running` leaves out who rests."""
    async with rig(tmp_path) as proxy:
        await proxy.call("/completion", {"prompt": "one two", "session_id": "a", "n_predict": 30})
        await proxy.settle()
        proxy.clock.now += 1
        reply = await proxy.api.get("/polykv/tps?once=1")
        shown: dict[str, Any] = reply.json()
        assert reply.headers["content-type"] == "application/json"
        assert [key for key in shown if key in {"ts", "seq", "aggregate_tps", "mean_active_tps", "n_active", "n_warming"}] == [
            "ts",
            "seq",
            "aggregate_tps",
            "mean_active_tps",
            "n_active",
            "n_warming",
        ]
        (session,) = shown["sessions"]
        assert set(FIELDS) <= set(session)
        assert session["tps_ewma"] == pytest.approx(1000)
        assert "compaction_pressure" in shown
        assert (await proxy.api.get("/polykv/tps?once=1&running=1")).json()["sessions"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("interval_ms=99", "interval_ms"),
        ("interval_ms=60001", "interval_ms"),
        ("interval_ms=x", "interval_ms"),
        ("once=1&interval_ms=x", "interval_ms"),
        ("once=2", "once"),
    ],
)
async def test_a_bad_query_is_named(tmp_path: Path, query: str, param: str) -> None:
    """400 with the parameter, and nothing begins."""
    async with rig(tmp_path) as proxy:
        reply = await proxy.api.get(f"/polykv/tps?{query}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        if param == "interval_ms":
            assert "from 100 to 60000" in reply.json()["error"]["message"]


@pytest.mark.parametrize("query", ["topics=pool,news", "topics=news&topics=pool", "topics="])
async def test_a_topic_that_is_none_is_named(tmp_path: Path, query: str) -> None:
    """Wherever it stands."""
    async with rig(tmp_path) as proxy:
        reply = await proxy.api.get(f"/polykv/events?{query}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "topics")


async def test_head_of_a_stream_has_no_body_and_ends(tmp_path: Path) -> None:
    """HEAD tells what GET would be."""
    async with rig(tmp_path) as proxy, watching(proxy, tmp_path) as client:
        for path in ("/polykv/tps", "/polykv/events"):
            reply = await asyncio.wait_for(client.head(path), 20)
            assert reply.headers["content-type"].startswith("text/event-stream")


async def test_twenty_watchers_cost_one_look_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All see the same events; the view is made no oftener than for one of them."""
    monkeypatch.setattr(glance, "TICK_S", 1e9)
    async with rig(tmp_path) as proxy, watching(proxy, tmp_path) as client:
        looks = []
        look = proxy.runtime.view.look
        monkeypatch.setattr(proxy.runtime.view, "look", lambda *args: looks.append(1) or look(*args))
        seen = await asyncio.gather(*(read(client, "/polykv/tps?interval_ms=100", 3) for _ in range(20)))
        assert {name for events in seen for name, _ in events} == {"tps"}
        assert len({json.dumps(data) for events in seen for _, data in events}) == len(looks) == 1


async def test_events_tell_of_pools_sessions_and_requests(tmp_path: Path) -> None:
    """One row in order: a pool is made, a session opens, its request runs, the pool goes; numbers grow and are the ids."""
    async with rig(tmp_path) as proxy, watching(proxy, tmp_path) as client:
        now = {"last-event-id": str(proxy.runtime.hub.telemetry.news.seq)}
        reading = asyncio.ensure_future(read(client, "/polykv/events", 14, now))
        pool = await proxy.pool(prompt="one two three four", name="p")
        body = {"prompt": "one two three four five", "pool_id": pool["pool_id"], "session_id": "a", "n_predict": 3}
        await proxy.call("/completion", body)
        await proxy.settle()
        await proxy.api.delete("/polykv/sessions/a")
        await proxy.api.delete("/polykv/pools/p")
        events = await reading
    told = [(name, data["type"]) for name, data in events]
    assert [kind for name, kind in told if name == "pool"] == ["created", "resident", "releasing", "released"]
    assert [kind for name, kind in told if name == "session"] == ["opened", "attached", "warming", "active", "idle", "ended"]
    assert [kind for name, kind in told if name == "request"] == ["launched", "first_token", "finished", "released"]
    assert [data["seq"] for _, data in events] == sorted({data["seq"] for _, data in events})
    assert all(str(data["seq"]) == data["id"] for _, data in events)
    request = [data for name, data in events if name == "request"][-1]
    assert (request["session_id"], request["pool_id"], request["n_shared"], request["n_decoded"]) == ("a", pool["pool_id"], 5, 3)
    assert request["tps"] == pytest.approx(1000)


@pytest.mark.parametrize("query", ["topics=pool,engine", "topics=pool&topics=engine"])
async def test_topics_are_a_list_in_either_form(tmp_path: Path, query: str) -> None:
    """With commas, or named again."""
    async with rig(tmp_path) as proxy, watching(proxy, tmp_path) as client:
        news = proxy.runtime.hub.telemetry.news
        at = news.seq
        for topic in (Topic.POOL, Topic.SESSION, Topic.ENGINE):
            news.publish(topic, "x")
        seen = await read(client, f"/polykv/events?{query}", 2, {"last-event-id": str(at)})
        assert [name for name, _ in seen] == ["pool", "engine"]


async def test_a_watcher_comes_back_without_a_gap_or_is_told(tmp_path: Path) -> None:
    """With the last number it gets what it missed; with a number of another run, one resync."""
    async with rig(tmp_path) as proxy, watching(proxy, tmp_path) as client:
        news = proxy.runtime.hub.telemetry.news
        at = news.seq
        news.publish(Topic.POOL, "created", pool_id=7)
        news.publish(Topic.ENGINE, "ready")
        missed = await read(client, "/polykv/events", 2, {"last-event-id": str(at)})
        assert [(name, data["type"]) for name, data in missed] == [("pool", "created"), ("engine", "ready")]
        ((name, data),) = await read(client, "/polykv/events", 1, {"last-event-id": "5"})
        assert (name, data["seq"]) == ("resync", news.seq)
        ((name, _),) = await read(client, "/polykv/events", 1, {"last-event-id": "what"})
        assert name == "resync"


async def test_a_watcher_that_does_not_read_is_not_written_to(tmp_path: Path) -> None:
    """It holds a bounded number of bytes however much happens, and then skips to what is new; others are not held up."""
    async with rig(tmp_path) as proxy, watching(proxy, tmp_path) as client:
        news = proxy.runtime.hub.telemetry.news
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "api.sock"), limit=1024)
        writer.write(b"GET /polykv/events HTTP/1.1\r\nHost: t\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        other = asyncio.ensure_future(read(client, "/polykv/events?topics=engine", 1, {"last-event-id": str(news.seq)}))
        for _burst in range(60):
            for _ in range(200):
                news.publish(Topic.POOL, "created", text="x" * 500)
            await asyncio.sleep(0.001)
        news.publish(Topic.ENGINE, "ready")
        (first,) = await other
        assert first[0] in {"engine", "resync"}
        news.close()
        told = b""
        async with asyncio.timeout(60):
            while b"event: closing" not in told:
                told += await reader.read(1 << 20)
        assert b"event: resync" in told
        assert news.n_gaps >= 1
        assert told.count(b"event: pool") < 12_000
        writer.close()
        await writer.wait_closed()


async def test_watchers_that_leave_are_noticed(tmp_path: Path) -> None:
    """Their tasks end; nothing is left of them."""
    async with rig(tmp_path) as proxy, watching(proxy, tmp_path) as client:
        before = len(asyncio.all_tasks())
        await asyncio.gather(*(read(client, "/polykv/tps?interval_ms=100", 2) for _ in range(10)))
        await client.aclose()
        async with asyncio.timeout(20):
            while len(asyncio.all_tasks()) > before:
                await asyncio.sleep(0.01)


async def test_streams_end_at_once_when_the_proxy_is_stopped(tmp_path: Path) -> None:
    """A last event, then the end; who comes now is sent away with 503."""
    async with rig(tmp_path) as proxy, watching(proxy, tmp_path) as client:
        reading = [asyncio.ensure_future(read(client, path, 99)) for path in ("/polykv/tps?interval_ms=60000", "/polykv/events")]
        async with asyncio.timeout(20):
            while proxy.runtime.glance._last is None:
                await asyncio.sleep(0.01)
        proxy.runtime.end_streams()
        ends = await asyncio.gather(*reading)
        assert [events[-1][0] for events in ends] == ["closing", "closing"]
        assert (await client.get("/polykv/tps")).status_code == 503
