"""Random calls by our own OpenAPI document: answers and events are in it, by status, kind and form, and none is a fault of ours."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS
from schemathesis.config import SchemathesisConfig

from polykv_proxy.api.document import document
from polykv_proxy.gpu_share import layout
from polykv_proxy.runtime.news import Topic
from tests.fakes.fake_engine import FakeEngine
from tests.integration.gpu_share.peers import new_key, segment
from tests.integration.rig import ManualClock, Rig, relayed, rig
from tests.lengths import examples

ENDLESS = ("/polykv/events", "/polykv/tps")
FIRST_EVENT = SchemathesisConfig.from_dict({"operations": [{"include-path": path, "max-stream-events": 1} for path in ENDLESS]})
SCHEMA = schemathesis.openapi.from_dict(document(), config=FIRST_EVENT)
CHECKED = [
    CHECKS.get_one(name)
    for name in ("status_code_conformance", "content_type_conformance", "response_schema_conformance", "negative_data_rejection")
]


@asynccontextmanager
async def lively(folder: Path) -> AsyncIterator[tuple[Rig, httpx.AsyncClient, str]]:
    """A proxy where something of every topic has happened, a client, and the id of an event before all that."""
    now = int(ManualClock().wall() * 1e6)
    peers = [layout.Entry(slot, 100 + slot, 5, 77, 1.0, True, now, 0, f"model-{slot}") for slot in range(3)]
    engine = FakeEngine()
    with new_key() as key:
        engine.gpu_share = {"enabled": True, "gpu_key": key, "slot": 0, "weight": 1.0}
        segment(key).write_bytes(layout.build(peers[:2]))
        async with rig(folder, engine) as proxy, relayed(proxy) as (_, client):
            await proxy.runtime.sweep()
            segment(key).write_bytes(layout.build((peers[0], peers[2])))
            await proxy.runtime.sweep()
            proxy.runtime.hub.telemetry.engine_state("ready", None)
            await proxy.pool(prompt="one two three four", name="a")
            (await client.post("/polykv/pools/a/admission", json={"target_tps_per_session": 5})).raise_for_status()
            body = {"prompt": "one two three four five", "pool_id": "a", "session_id": "s"}
            (await client.post("/completion", json=body)).raise_for_status()
            await proxy.settle()
            yield proxy, client, str(proxy.runtime.hub.ledger.first_number - 1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A proxy over a fake engine, in a loop of its own: its address, and the id of an early event."""
    ready, over = threading.Event(), asyncio.Event()
    found: list[tuple[str, str]] = []

    async def serve() -> None:
        async with lively(tmp_path_factory.mktemp("proxy")) as (_, client, early):
            found.append((str(client.base_url), early))
            loops.append(asyncio.get_running_loop())
            ready.set()
            await over.wait()

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield found[0]
    loops[0].call_soon_threadsafe(over.set)
    thread.join(30)
    assert not thread.is_alive()


@SCHEMA.parametrize()
@settings(max_examples=examples(5), phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None)
def test_answers_are_as_documented(case: schemathesis.Case, served: tuple[str, str]) -> None:
    """On every operation, with values that fit the document and with others; of a stream without end, the first event."""
    url, early = served
    for name, known in (("key", "a"), ("session_id", "s")):
        if len(str(case.path_parameters.get(name, ""))) % 2:  # one of those that are there
            case.path_parameters[name] = known
            with httpx.Client(base_url=url, trust_env=False) as client:
                client.post("/polykv/pools", json={"prompt": "one two three four", "name": "a"}).raise_for_status()
                client.post("/completion", json={"prompt": "one two three", "pool_id": "a", "session_id": "s"}).raise_for_status()
    if case.path == "/polykv/events":
        case.headers.setdefault("Last-Event-ID", early)  # from now on there may be nothing
    response = case.call(base_url=url)
    assert response.status_code != 500, response.text
    case.validate_response(response, checks=CHECKED)


@pytest.mark.parametrize(
    ("path", "known", "names"),
    [
        ("/polykv/events", True, {*Topic, "closing"}),
        ("/polykv/events", False, {"resync", "engine", "pool", "closing"}),
        ("/polykv/tps", False, {"tps", "closing"}),
    ],
)
async def test_events_of_every_kind_are_as_documented(tmp_path: Path, path: str, *, known: bool, names: set[str]) -> None:
    """What has happened, what happens while an engine dies, and the last word."""
    async with lively(tmp_path) as (proxy, client, early):
        headers = {"Last-Event-ID": early if known else "of another"}
        async with client.stream("GET", path, headers=headers) as response:
            await proxy.server.stop()
            await proxy.until_unlinked()
            proxy.runtime.end_streams()
            await response.aread()
    SCHEMA[path]["GET"].Case(headers=headers).validate_response(response, checks=CHECKED)
    assert set(re.findall("^event: (.*)$", response.text, re.MULTILINE)) == names


async def test_events_of_making_a_pool_are_as_documented(tmp_path: Path) -> None:
    """To its end, and to the end of one that was released meanwhile."""
    verb = SCHEMA["/polykv/pools"]["POST"]
    async with lively(tmp_path) as (proxy, client, _):
        made = await client.post("/polykv/pools?stream=1", json={"tokens": list(range(16, 316))})
        proxy.engine.hold()
        async with client.stream("POST", "/polykv/pools?stream=1", json={"tokens": [1, 2, 3], "name": "b"}) as gone:
            release = asyncio.ensure_future(client.delete("/polykv/pools/b"))
            await gone.aread()
            await release
    for response, last in ((made, "done"), (gone, "error")):
        verb.Case(query={"stream": "1"}).validate_response(response, checks=CHECKED)
        assert set(re.findall("^event: (.*)$", response.text, re.MULTILINE)) == {"progress", last}
