"""Mirrors engine/client.py: what the engine may not say, and what callers may do who leave."""

import asyncio
import random
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import pytest

from polykv_proxy.engine import wire
from polykv_proxy.engine.client import EngineClient, refused, split_counted
from polykv_proxy.engine.events import EngineEvents
from polykv_proxy.errors import EngineAbilityError, EngineError, EngineRefusedError, EngineUnavailableError
from polykv_proxy.ports import EngineAddress

ROOT = "/llm/_polykv/v1"
SSE = {"content-type": "text/event-stream"}


class Script:
    """What the engine answers on each path, or the exception that its transport raises; and what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[], httpx2.Response] | Exception] = {}
        self.requests: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        answer = self.answers[f"{request.method} {request.url.path}"]
        if isinstance(answer, Exception):
            raise answer
        return answer()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def client(script: Script) -> AsyncIterator[EngineClient]:
    transport = httpx2.MockTransport(script)
    made = EngineClient(EngineAddress(port=9), "k", api_key="a", api_prefix="/llm", transport=transport)
    yield made
    await made.close()


async def test_no_certificates_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no TLS to an engine, and loading them takes longer than all else that makes a client."""
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", pytest.fail)
    await EngineClient(EngineAddress(port=9), "k").close()


async def test_every_call_carries_both_keys_and_the_prefix(client: EngineClient, script: Script) -> None:
    """The private key, the engine's own API key, and its path prefix."""
    script.answers[f"GET {ROOT}/state"] = lambda: httpx2.Response(200, json={"boot_id": "b", "update": 1})
    assert (await client.state()).update == 1
    headers = script.requests[0].headers
    assert (headers["x-polykv-key"], headers["authorization"]) == ("k", "Bearer a")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (httpx2.Response(404, json={"error": {"message": "File Not Found", "type": "not_found_error"}}), EngineAbilityError),
        (httpx2.Response(501, text="router"), EngineAbilityError),
        (httpx2.Response(401, json={}), EngineAbilityError),
        (httpx2.Response(503, json={"error": {"message": "Loading model"}}), EngineUnavailableError),
        (httpx2.Response(500, text="oops"), EngineRefusedError),
        (httpx2.Response(200, text="<html>"), EngineError),
        (httpx2.Response(200, json={"protocol": {"major": 1}}), EngineError),
    ],
)
async def test_a_hello_that_is_none_is_told_apart(
    client: EngineClient, script: Script, reply: httpx2.Response, error: type[Exception]
) -> None:
    """No verbs, not ready, broken, and not our protocol are different errors, all of them EngineErrors."""
    script.answers[f"GET {ROOT}/hello"] = lambda: reply
    with pytest.raises(error) as raised:
        await client.hello()
    assert isinstance(raised.value, EngineError)


async def test_a_refused_connection_is_an_engine_that_is_away(client: EngineClient, script: Script) -> None:
    """Transport errors of every kind are EngineUnavailableError."""
    for error in (
        httpx2.ConnectError("no"),
        httpx2.ReadError("cut"),
        httpx2.ReadTimeout("slow"),
        httpx2.RemoteProtocolError("odd"),
    ):
        script.answers[f"GET {ROOT}/state"] = error
        with pytest.raises(EngineUnavailableError):
            await client.state()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "without a result"),
        ("event: queued\ndata: {}\n\n", "without a result"),
        ("event: done\ndata: {}\n\n", "does not follow the protocol"),
        ('event: error\ndata: {"status":422,"type":"too_long","message":"too long"}\n\n', "too long"),
    ],
)
async def test_a_materialisation_without_a_proper_end_has_failed(
    client: EngineClient, script: Script, text: str, error: str
) -> None:
    """A stream that ends with neither `done` nor `error` is an error, and so is nonsense."""
    script.answers[f"POST {ROOT}/seqs"] = lambda: httpx2.Response(200, text=text, headers=SSE)
    with pytest.raises(EngineError, match=error):
        async for _ in client.make_seq({"tokens": [1]}):
            pass


async def test_an_answer_that_is_no_stream_is_an_error(client: EngineClient, script: Script) -> None:
    """A JSON answer where events belong is refused, not waited for."""
    script.answers[f"POST {ROOT}/seqs"] = lambda: httpx2.Response(200, json={"ok": True})
    with pytest.raises(EngineError, match="event stream"):
        async for _ in client.make_seq({"tokens": [1]}):
            pass


async def test_events_are_resumed_after_the_last_one_and_unknown_ones_skipped(client: EngineClient, script: Script) -> None:
    """The id of the last event goes back as Last-Event-ID, also when that event was of a kind we do not know."""
    lines = 'id: 1\nevent: hello\ndata: {"boot_id":"b"}\n\nid: 2\nevent: something_else\ndata: {}\n\n'
    script.answers[f"GET {ROOT}/events"] = lambda: httpx2.Response(200, text=lines, headers=SSE)
    events = EngineEvents(client)
    assert len([event async for event in events.listen()]) == 1
    assert len([event async for event in events.listen()]) == 1
    assert ["last-event-id" in request.headers for request in script.requests] == [False, True]
    assert script.requests[1].headers["last-event-id"] == "2"


async def test_an_event_that_makes_no_sense_is_an_error(client: EngineClient, script: Script) -> None:
    """Wrong types at the edge never reach the core."""
    text = 'event: released\ndata: {"type":"released","req":"x"}\n\n'
    script.answers[f"GET {ROOT}/events"] = lambda: httpx2.Response(200, text=text, headers=SSE)
    with pytest.raises(EngineError, match="does not follow the protocol"):
        async for _ in EngineEvents(client).listen():
            pass


async def test_an_event_of_any_length_is_read(client: EngineClient, script: Script) -> None:
    """The last event of a snapshot has the tokens of a whole context in it."""
    tokens = ",".join(["128000"] * 400_000)
    facts = '"seq":"1.1","n_tokens":400000,"n_shared":0,"cells":1,"update":1,"boot_id":"b"'
    text = f'event: done\ndata: {{{facts},"tokens":[{tokens}]}}\n\n'
    script.answers[f"POST {ROOT}/seqs"] = lambda: httpx2.Response(200, text=text, headers=SSE)
    (made,) = [step async for step in client.make_seq({"session": 1})]
    assert isinstance(made, wire.Made)
    assert len(made.tokens or []) == 400_000


class Engine:
    """Answers `state` on a unix socket, one question after the other on each connection."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = b'{"boot_id":"b","update":1}'
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await asyncio.sleep(0)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def test_callers_who_leave_take_no_connection_with_them(tmp_path: Path) -> None:
    """Many who give up at any moment, most of them while they wait for a connection: the next call is answered."""
    dice = random.Random(1)
    path = tmp_path / "s"
    async with await asyncio.start_unix_server(Engine(), path), asyncio.timeout(100):
        client = EngineClient(EngineAddress(uds=str(path)), "k")
        for _ in range(40):
            calls = [asyncio.ensure_future(client.state()) for _ in range(64)]
            for _ in range(dice.randrange(60)):
                await asyncio.sleep(0)
            for call in dice.sample(calls, 40):
                call.cancel()
            done = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(isinstance(one, wire.State) for one in done) >= 24
        assert (await client.state()).update == 1
        await client.close()


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
