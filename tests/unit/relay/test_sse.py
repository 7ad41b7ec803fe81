"""The tail of an event stream."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.api.relay.sse import SseTail, error_event


@given(st.lists(st.binary(max_size=12) | st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r", b"\n", b"data: x\n\n"]), max_size=20))
def test_a_stream_that_ends_normally_is_unchanged(pieces: list[bytes]) -> None:
    """Whatever is fed comes out, in order, once."""
    tail = SseTail()
    out = b"".join(tail.feed(piece) for piece in pieces) + tail.end()
    assert out == b"".join(pieces)


@given(st.integers(0, 60))
def test_only_whole_events_leave_before_the_end(cut: int) -> None:
    """Fed up to any byte, what has left ends at an event boundary."""
    stream = b"data: 1\n\ndata: 2\r\n\r\n: ping\n\nevent: x\ndata: 3\n\n"
    out = SseTail().feed(stream[:cut])
    assert out == b"" or out.endswith((b"\n\n", b"\r\n\r\n"))


def test_a_huge_event_is_not_held_for_ever() -> None:
    """Beyond the limit bytes pass, and a cut then closes the open event first."""
    tail = SseTail()
    big = b"data: " + b"x" * 300_000
    assert tail.feed(big) == big
    assert tail.cut(b"data: e\n\n") == b"\n\ndata: e\n\n"


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"event: message_stop\ndata: {}\n\n"])
def test_a_finished_stream_gets_nothing_more(end: bytes) -> None:
    """After the end marker of its protocol a stream is complete."""
    tail = SseTail()
    tail.feed(b"data: 1\n\n" + end)
    assert tail.cut(b"data: e\n\n") == b""


def test_whole_lines_are_sent_before_the_error() -> None:
    """A data line that lacks only its blank line is closed and kept."""
    tail = SseTail()
    tail.feed(b"data: 1\n\ndata: 2\n")
    assert tail.cut(b"data: e\n\n") == b"data: 2\n\ndata: e\n\n"


@pytest.mark.parametrize(
    ("path", "name"), [(b"/v1/messages", b"event: error\n"), (b"/v1/responses", b"event: error\n"), (b"/completion", b"")]
)
def test_the_error_event_speaks_the_protocol_of_its_route(path: bytes, name: bytes) -> None:
    """Named where events are named; one line of JSON always."""
    event = error_event(path, "engine_unavailable", "unavailable_error", "gone\nnow")
    assert event.startswith(name + b"data: {")
    assert event.endswith(b"\n\n")
    data = json.loads(event.split(b"data: ", 1)[1])
    assert data["error"]["message"] == "gone\nnow"


@pytest.mark.parametrize(
    ("kind", "named"),
    [("rate_limit_error", "rate_limit_error"), ("not_found_error", "not_found_error"), ("unavailable_error", "api_error")],
)
def test_the_messages_protocol_is_told_its_own_error_types(kind: str, named: str) -> None:
    """A client that waits on `rate_limit_error` does so in a stream too; a type that the protocol lacks is `api_error`."""
    event = error_event(b"/v1/messages", "saturated", kind, "no room")
    assert json.loads(event.split(b"data: ", 1)[1]) == {"type": "error", "error": {"type": named, "message": "no room"}}
