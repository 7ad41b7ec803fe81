"""Random requests and random replies, before a scripted engine: the engine sees the same request, the client the same reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig
from tests.fakes.stub_engine import Do, Seen, Step, Stub
from tests.fuzz.asks import CUTS, HEADERS, SIZES, Ask, Framed, asks, bodies, targets
from tests.fuzz.equality import face
from tests.fuzz.wire import Wire
from tests.lengths import examples

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

N = examples(60)
METHODS = (b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"HEAD", b"OPTIONS", b"PURGE", b"PROPFIND")
BODILESS = (204, 304)
SLOW = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@dataclass(frozen=True)
class Answer:
    """What the scripted engine answers."""

    status: int
    reason: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    framed: Framed
    chunks: Sequence[int]
    cuts: Sequence[int]
    closes: bool

    def steps(self, seen: Seen) -> list[Step]:
        """Written in pieces."""
        as_ask = Ask(headers=self.headers, body=self.body, framed=self.framed, chunks=self.chunks, cuts=self.cuts)
        _, _, fields = as_ask.head.split(b"\r\n", 2)
        close = self.closes or self.framed is Framed.NONE
        head = b"HTTP/1.1 %d %b\r\n%b%b" % (self.status, self.reason, b"Connection: close\r\n" if close else b"", fields)
        if self.status == 204:
            head = head.replace(b"Content-Length: %d\r\n" % len(self.body), b"").replace(b"Transfer-Encoding: chunked\r\n", b"")
        if seen.method == b"HEAD" or self.status in BODILESS:
            return [head, *([Do.CLOSE] if close else [])]
        body = self.body if self.framed is Framed.NONE else as_ask.wire_body
        return [*as_ask.pieces(head + body), *([Do.CLOSE] if close else [])]


EVENTS = st.lists(
    st.sampled_from(
        [b"data: {}\n\n", b"data: x\r\n\r\n", b": c\n\n", b"event: e\n", "data: ä€😀\n".encode(), b"\n", b"\r", b"data"]
    )
)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    status = draw(st.sampled_from([200, 200, 200, 201, 202, 204, 206, 301, 304, 400, 404, 418, 429, 500, 501, 503, 599]))
    events = draw(st.booleans())
    kind = b"text/event-stream" if events else draw(st.sampled_from([b"application/json", b"text/html", b"image/png"]))
    return Answer(
        status=status,
        reason=draw(st.sampled_from([b"OK", b"Odd Reason (1)", b"X"])),
        headers=[*draw(HEADERS), (b"Content-Type", kind)],
        body=b"".join(draw(EVENTS)) if events else draw(bodies()),
        framed=draw(st.sampled_from([Framed.LENGTH, Framed.CHUNKED, Framed.NONE])),
        chunks=draw(SIZES),
        cuts=draw(CUTS),
        closes=draw(st.sampled_from([False, False, True])),
    )


KEPT = asks(targets(), bodies(), METHODS).map(lambda ask: replace(ask, version=b"1.1", expects=False, connection=None))
"""Requests after which their connection goes on."""


@st.composite
def repeats(draw: st.DrawFn) -> list[Ask]:
    """A row of a few requests again and again, cut in other places: heads that were read before, whole and in pieces."""
    few = draw(st.lists(KEPT, min_size=1, max_size=2))
    return [replace(ask, cuts=draw(CUTS)) for ask in draw(st.lists(st.sampled_from(few), min_size=3, max_size=8))]


class Rigged:
    """A stub and a relay before it."""

    def __init__(self, stub: Stub, rig: RelayRig) -> None:
        self.stub = stub
        self.rig = rig
        self.answer: Answer | None = None

    def heard(self, address: int, ask: Ask) -> tuple[object, object, bool]:
        """What the engine saw, what the client heard, and whether its connection goes on."""
        before = len(self.stub.requests)
        with Wire(address) as wire:
            heard = wire.ask(ask)
            saw = self.stub.wait_requests(before + 1)
            said = face(heard.reply)
            self.answer = None
            goes_on = wire.goes_on(Ask())
        return _seen(saw), said, goes_on


def _seen(seen: Seen) -> tuple[bytes, list[bytes], bytes]:
    line, *fields = seen.head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    skipped = (b"connection:", b"keep-alive:", b"expect:", b"transfer-encoding:", b"content-length:", b"host:")
    kept = [b"%b: %b" % (name, value.strip()) for name, _, value in (one.partition(b":") for one in fields)]
    return line.replace(b"HTTP/1.0", b"HTTP/1.1"), [one for one in kept if not one.lower().startswith(skipped)], seen.body


@pytest.fixture(scope="module")
def rigged() -> Iterator[Rigged]:
    held: list[Rigged] = []

    def script(seen: Seen) -> list[Step]:
        answer = held[0].answer
        return [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"] if answer is None else answer.steps(seen)

    with Stub(script, keep_idle_s=30) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        held.append(Rigged(stub, rig))
        yield held[0]


@settings(SLOW, max_examples=N)
@given(asks(targets(), bodies(), METHODS), answers())
def test_both_sides_see_the_same(rigged: Rigged, ask: Ask, answer: Answer) -> None:
    """Request line, fields, body, status, reply and its fields are equal; the connection goes on unless it was asked to end."""
    rigged.answer = answer
    direct = rigged.heard(rigged.stub.port, ask)
    rigged.answer = answer
    through = rigged.heard(rigged.rig.port, ask)
    assert through[:2] == direct[:2]
    assert through[2] == (not ask.wants_end)
    assert rigged.rig.on_loop(lambda: len(rigged.rig.relay.running)) == 0


@settings(SLOW, max_examples=max(10, N // 2))
@given(
    asks(targets(), bodies(), METHODS).map(lambda ask: replace(ask, expects=False)),
    answers(),
    st.lists(st.tuples(st.binary(max_size=200), st.binary(max_size=200)), min_size=2, max_size=4),
)
def test_heads_that_were_read_before(rigged: Rigged, ask: Ask, answer: Answer, others: list[tuple[bytes, bytes]]) -> None:
    """The same request again and again, with other bodies and other answers: each is what it is without anything between."""
    for body, answered in [(ask.body, answer.body), *others, *others]:
        now, then = replace(ask, body=body), replace(answer, body=answered)
        rigged.answer = then
        direct = rigged.heard(rigged.stub.port, now)
        rigged.answer = then
        assert rigged.heard(rigged.rig.port, now) == (*direct[:2], not now.wants_end)


@settings(SLOW, max_examples=max(10, N // 3))
@given(st.one_of(st.lists(KEPT, min_size=2, max_size=5), repeats()), answers())
def test_a_row_is_answered_in_order(rigged: Rigged, row: list[Ask], answer: Answer) -> None:
    """Requests sent without waiting get the replies that each gets alone, in order, on one connection."""
    rigged.answer = answer
    alone = []
    for ask in row:
        with Wire(rigged.stub.port) as wire:
            alone.append(face(wire.ask(ask).reply))
    before = len(rigged.stub.requests)
    with Wire(rigged.rig.port) as wire:
        assert [face(reply) for reply in wire.row(row)] == alone
    saw = [_seen(seen)[0] for seen in rigged.stub.requests[before:]]
    assert saw == [b"%b %b HTTP/1.1" % (ask.method, ask.target) for ask in row]
