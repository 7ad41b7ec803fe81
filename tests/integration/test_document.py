"""Random calls by our own OpenAPI document: every answer is in it, by status, kind and form, and none is a fault of ours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS

from polykv_proxy.api.document import document
from tests.integration.rig import relayed, rig
from tests.lengths import examples

SCHEMA = schemathesis.openapi.from_dict(document())
STREAMS = ("/polykv/events", "/polykv/tps")
CHECKED = [
    CHECKS.get_one(name)
    for name in ("status_code_conformance", "content_type_conformance", "response_schema_conformance", "negative_data_rejection")
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A proxy over a fake engine, in a loop of its own."""
    ready, over = threading.Event(), asyncio.Event()
    found: list[str] = []

    async def serve() -> None:
        async with rig(tmp_path_factory.mktemp("proxy")) as proxy, relayed(proxy) as (_, client):
            found.append(str(client.base_url))
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


@SCHEMA.exclude(path=list(STREAMS)).parametrize()
@settings(max_examples=examples(5), phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None)
def test_answers_are_as_documented(case: schemathesis.Case, url: str) -> None:
    """On every operation, with values that fit the document and with others."""
    for name, known in (("key", "a"), ("session_id", "s")):
        if len(str(case.path_parameters.get(name, ""))) % 2:  # one of those that are there
            case.path_parameters[name] = known
            with httpx.Client(base_url=url, trust_env=False) as client:
                client.post("/polykv/pools", json={"prompt": "one two three four", "name": "a"}).raise_for_status()
                client.post("/completion", json={"prompt": "one two three", "pool_id": "a", "session_id": "s"}).raise_for_status()
    response = case.call(base_url=url)
    assert response.status_code != 500, response.text
    case.validate_response(response, checks=CHECKED)
