"""F015: an error that comes inside a stream of status 200 crosses unchanged and is counted as one; what only looks odd is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from polykv_proxy.core.attach import Wish
from polykv_proxy.core.events import SlotEvent, SlotEventKind
from polykv_proxy.core.tally import Ending
from polykv_proxy.core.turn_tally import Reason
from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import END, SSE_HEAD, Script, Seen, Stub, chunk
from tests.integration.rig import rig

TOKENS = b"".join(b'data: {"choices":[{"index":0,"delta":{"content":"an \\nerror: %d"}}]}\n\n' % n for n in range(3))
"""Text that speaks of errors is no error."""
ERROR = b'{"error":{"code":500,"message":"it broke","type":"server_error"}}'
FORMS = {
    "a field of that name": (b"error: " + ERROR + b"\n\n", Ending.ENGINE_ERROR),
    "data": (b"data: " + ERROR + b"\n\n", Ending.ENGINE_ERROR),
    "a named event": (b'event: error\ndata: {"type":"error"}\n\n', Ending.ENGINE_ERROR),
    "a comment": (b": still here\n\n", Ending.COMPLETE),
    "no data": (b"data: \n\n", Ending.COMPLETE),
}
DONE = b"data: [DONE]\n\n"


def scripts(whole: bytes) -> dict[bytes, Script]:
    """In one piece, and byte by byte."""
    return {
        b"/v1/chat/completions": [SSE_HEAD, chunk(whole) + END],
        b"/v1/completions": [SSE_HEAD, *(chunk(whole[n : n + 1]) for n in range(len(whole))), END],
    }


@pytest.mark.parametrize("form", FORMS)
def test_bytes_cross_unchanged_and_the_error_is_counted_once(form: str) -> None:
    """However the engine splits its writes: the reply is what it sent, and each request has ended in the one way or the other."""
    event, ending = FORMS[form]
    whole = TOKENS + event + DONE

    def script(seen: Seen) -> Script:
        return scripts(whole)[seen.target]

    with Stub(script) as stub, RelayRig(EngineAddress(port=stub.port)) as relay:
        for path in scripts(whole):
            got = relay.send(request(b"POST", path, b'{"stream":true}'))
            assert (got.body, got.complete) == (whole, True)
        ended = relay.on_loop(lambda: relay.relay.tally.ended)
        assert sorted((how, n) for (_, how), n in ended.items()) == [(ending, 1)] * 2


async def test_a_turn_that_ended_so_is_told_as_an_error_once(tmp_path: Path) -> None:
    """The engine's word closes the book: one turn ended by an error, one event says so, and the session holds nothing."""
    async with rig(tmp_path) as proxy:
        hub, now = proxy.runtime.hub, proxy.clock.wall()
        req = hub.ledger.take_req()
        _, session = hub.ledger.admit(req, Wish(session_id="s"), now)
        assert session is not None
        first = hub.telemetry.news.seq
        for kind, reason in ((SlotEventKind.LAUNCHED, None), (SlotEventKind.RELEASED, "error")):
            event = SlotEvent(kind, req, 0, session.number, None, task=1, slot=0, n_prompt=9, reason=reason)
            hub.telemetry.saw(event)
            hub.ledger.engine_event(event, now)
        assert dict(hub.telemetry.turns.ended) == {Reason.ERROR: 1}
        told = [one for one in hub.telemetry.news._ring if one.seq > first and one.facts.get("reason") == "error"]
        assert [(one.type, one.facts["session_id"]) for one in told] == [("released", "s")]
        shown = (await proxy.api.get("/polykv/sessions/s")).json()
        assert (shown["state"], shown["n_streams"], len(hub.ledger.books)) == ("idle", 0, 0)
