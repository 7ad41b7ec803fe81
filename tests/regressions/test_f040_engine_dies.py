"""F040: when the engine dies in mid-stream, an event-stream client sees whole events and one error event; others see a cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from httpx_sse._decoders import SSEDecoder

from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import SSE_HEAD, Do, Stub, chunk

WHOLE = b'data: {"n":1}\n\n'
TAILS = {
    "between events": b"",
    "half a data line": b'data: {"n":',
    "a full line without the blank line": b'data: {"n":2}\n',
    "an event name alone": b"event: delta\n",
    "inside a character": 'data: {"t":"é'.encode()[:-1],
}


def _events(body: bytes) -> Iterator[Any]:
    decoder = SSEDecoder()
    for line in body.decode().split("\n"):
        event = decoder.decode(line)
        if event is not None:
            yield event


@pytest.mark.parametrize("end", [Do.CLOSE, Do.DROP])
@pytest.mark.parametrize("tail", list(TAILS))
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"])
def test_one_valid_error_event_ends_the_stream(path: bytes, tail: str, end: Do) -> None:
    """A standard parser yields only whole valid events, then exactly one error event in the protocol of the route."""
    steps = [SSE_HEAD, chunk(WHOLE), *([chunk(TAILS[tail])] if TAILS[tail] else []), 0.05, end]
    with Stub(lambda _: steps) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        got = rig.send(request(b"POST", path, b"{}"))
        assert got.complete
        events = list(_events(got.body))
        parsed = [json.loads(event.data) for event in events]
        assert parsed[0] == {"n": 1}
        assert ["error" in event for event in parsed].count(True) == 1
        assert "error" in parsed[-1]
        if path == b"/v1/messages":
            assert events[-1].event == "error"
            assert parsed[-1]["type"] == "error"
            assert set(parsed[-1]["error"]) == {"type", "message"}


def test_a_stream_that_said_done_gets_no_error() -> None:
    """Dying after the end marker is no failure for the client."""
    with (
        Stub(lambda _: [SSE_HEAD, chunk(WHOLE), chunk(b"data: [DONE]\n\n"), 0.05, Do.CLOSE]) as stub,
        RelayRig(EngineAddress(port=stub.port)) as rig,
    ):
        got = rig.send(request(b"POST", b"/v1/chat/completions", b"{}"))
        assert got.body == WHOLE + b"data: [DONE]\n\n"
        assert got.complete


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_other_bodies_are_cut_visibly(head: bytes) -> None:
    """A body that is not an event stream ends short of its framing: nothing is added to it."""
    part = b"{" if b"Length" in head else chunk(b"{")
    with Stub(lambda _: [head, part, 0.05, Do.CLOSE]) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        got = rig.send(request())
        assert got.body == b"{"
        assert not got.complete


def test_no_reply_at_all_is_a_503_to_try_again() -> None:
    """An engine that closes before the head gives an OpenAI-shaped 503 with Retry-After."""
    with Stub(lambda _: [Do.CLOSE]) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        got = rig.send(request(b"POST", b"/v1/chat/completions", b"{}"))
        assert got.status == 503
        assert got.header(b"retry-after") == [b"1"]
        assert set(json.loads(got.body)["error"]) >= {"message", "type", "code", "param"}
