"""Mirrors engine/client.py: what the engine may not say."""

import struct
from collections.abc import AsyncIterator

import httpx
import pytest
import respx

from polykv_proxy.engine.client import EngineClient, refused, split_counted
from polykv_proxy.engine.events import EngineEvents
from polykv_proxy.errors import EngineAbilityError, EngineError, EngineRefusedError, EngineUnavailableError
from polykv_proxy.ports import EngineAddress

ROOT = "http://127.0.0.1:9/llm/_polykv/v1"
SSE = {"content-type": "text/event-stream"}


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = EngineClient(EngineAddress(port=9), "k", api_key="a", api_prefix="/llm")
    yield made
    await made.close()


@respx.mock
async def test_every_call_carries_both_keys_and_the_prefix(client: EngineClient) -> None:
    """The private key, the engine's own API key, and its path prefix."""
    route = respx.get(f"{ROOT}/state").respond(json={"boot_id": "b", "update": 1})
    assert (await client.state()).update == 1
    headers = route.calls[0].request.headers
    assert (headers["x-polykv-key"], headers["authorization"]) == ("k", "Bearer a")


@respx.mock
@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (httpx.Response(404, json={"error": {"message": "File Not Found", "type": "not_found_error"}}), EngineAbilityError),
        (httpx.Response(501, text="router"), EngineAbilityError),
        (httpx.Response(401, json={}), EngineAbilityError),
        (httpx.Response(503, json={"error": {"message": "Loading model"}}), EngineUnavailableError),
        (httpx.Response(500, text="oops"), EngineRefusedError),
        (httpx.Response(200, text="<html>"), EngineError),
        (httpx.Response(200, json={"protocol": {"major": 1}}), EngineError),
    ],
)
async def test_a_hello_that_is_none_is_told_apart(client: EngineClient, reply: httpx.Response, error: type[Exception]) -> None:
    """No verbs, not ready, broken, and not our protocol are different errors, all of them EngineErrors."""
    respx.get(f"{ROOT}/hello").mock(return_value=reply)
    with pytest.raises(error) as raised:
        await client.hello()
    assert isinstance(raised.value, EngineError)


@respx.mock
async def test_a_refused_connection_is_an_engine_that_is_away(client: EngineClient) -> None:
    """Transport errors of every kind are EngineUnavailableError."""
    for error in (httpx.ConnectError("no"), httpx.ReadError("cut"), httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("odd")):
        respx.get(f"{ROOT}/state").mock(side_effect=error)
        with pytest.raises(EngineUnavailableError):
            await client.state()


@respx.mock
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "without a result"),
        ("event: queued\ndata: {}\n\n", "without a result"),
        ("event: done\ndata: {}\n\n", "does not follow the protocol"),
        ('event: error\ndata: {"status":422,"type":"too_long","message":"too long"}\n\n', "too long"),
    ],
)
async def test_a_materialisation_without_a_proper_end_has_failed(client: EngineClient, text: str, error: str) -> None:
    """A stream that ends with neither `done` nor `error` is an error, and so is nonsense."""
    respx.post(f"{ROOT}/seqs").respond(text=text, headers=SSE)
    with pytest.raises(EngineError, match=error):
        async for _ in client.make_seq({"tokens": [1]}):
            pass


@respx.mock
async def test_an_answer_that_is_no_stream_is_an_error(client: EngineClient) -> None:
    """A JSON answer where events belong is refused, not waited for."""
    respx.post(f"{ROOT}/seqs").respond(json={"ok": True})
    with pytest.raises(EngineError, match="event stream"):
        async for _ in client.make_seq({"tokens": [1]}):
            pass


@respx.mock
async def test_events_are_resumed_after_the_last_one_and_unknown_ones_skipped(client: EngineClient) -> None:
    """The id of the last event goes back as Last-Event-ID, also when that event was of a kind we do not know."""
    lines = 'id: 1\nevent: hello\ndata: {"boot_id":"b"}\n\nid: 2\nevent: something_else\ndata: {}\n\n'
    route = respx.get(f"{ROOT}/events").respond(text=lines, headers=SSE)
    events = EngineEvents(client)
    assert len([event async for event in events.listen()]) == 1
    assert len([event async for event in events.listen()]) == 1
    assert ["last-event-id" in call.request.headers for call in route.calls] == [False, True]
    assert route.calls[1].request.headers["last-event-id"] == "2"


@respx.mock
async def test_an_event_that_makes_no_sense_is_an_error(client: EngineClient) -> None:
    """Wrong types at the edge never reach the core."""
    respx.get(f"{ROOT}/events").respond(text='event: released\ndata: {"type":"released","req":"x"}\n\n', headers=SSE)
    with pytest.raises(EngineError, match="does not follow the protocol"):
        async for _ in EngineEvents(client).listen():
            pass


def test_counted_lists_add_up_or_are_refused() -> None:
    """Lists read back as they were written; a cut or padded answer is an error."""
    raw = struct.pack("<I2iI0I", 2, 7, -1, 0)
    assert [tokens.tolist() for tokens in split_counted(raw)] == [[7, -1], []]
    assert split_counted(b"") == []
    for bad in (raw[:-1], raw[:8], raw + b"\x01", struct.pack("<I", 2**31)):
        with pytest.raises(EngineError, match="cut short"):
            split_counted(bad)


def test_any_body_makes_a_refusal_readable() -> None:
    """An error answer without our error shape still has a message."""
    assert refused(500, b"").message == "status 500"
    assert refused(500, b"\xff\xfe").message
    assert refused(404, b'{"error": "text"}').message
    assert refused(410, b'{"error":{"type":"stale_seq","message":"gone"}}').kind == "stale_seq"
