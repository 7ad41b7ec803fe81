"""F034: characters and line ends that are cut anywhere reach the client byte for byte, and no event is counted twice or lost."""

from __future__ import annotations

import json

import pytest

from polykv_proxy.core.tally import Ending, Route
from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import END, SSE_HEAD, Stub, chunk

EVENT = 'data: {"choices":[{"delta":{"content":"é€😀"}}]}\n\n'.encode()
CRLF = EVENT.replace(b"\n", b"\r\n")
EMOJI = EVENT.index("😀".encode()) + 2
LAYOUTS: dict[str, list[bytes]] = {
    "a byte at a time": [EVENT[n : n + 1] for n in range(len(EVENT))],
    "inside the emoji": [EVENT[:EMOJI], EVENT[EMOJI:]],
    "between CR and LF": [CRLF[: CRLF.index(b"\n")], CRLF[CRLF.index(b"\n") : -1], CRLF[-1:]],
    "two in one write": [EVENT + EVENT],
    "one and a half": [EVENT + EVENT[:EMOJI], EVENT[EMOJI:]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
def test_bytes_are_the_engine_s(layout: str, kind: bytes) -> None:
    """Whatever the cuts: all bytes, in order, as whole events, and one complete exchange in the books."""
    pieces = LAYOUTS[layout]
    script = [SSE_HEAD.replace(b"text/event-stream", kind), *[step for piece in pieces for step in (chunk(piece), 0.001)], END]
    with Stub(lambda _: script) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        got = rig.send(request(b"POST", b"/v1/chat/completions", b"{}"))
        assert got.complete
        assert got.body == b"".join(pieces)
        events = got.body.decode().replace("\r\n", "\n").strip().split("\n\n")
        assert [json.loads(event.removeprefix("data: ")) for event in events] == [json.loads(EVENT[6:])] * len(events)
        ended = rig.on_loop(lambda: dict(rig.relay.tally.ended))
        assert {where: n for where, n in ended.items() if n} == {(Route.CHAT, Ending.COMPLETE): 1}
