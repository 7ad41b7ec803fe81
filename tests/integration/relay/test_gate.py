"""The relay and its gate: what is asked, what is sent, and that every plan ends exactly once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence

import pytest

from polykv_proxy.api.relay import RelayLimits
from polykv_proxy.errors import ApiError
from polykv_proxy.ports import EngineAddress, Header, Plan, Refusal, RelayRequest, StreamStart
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import END, SSE_HEAD, Do, Stub, chunk, reply

CHAT = b"/v1/chat/completions"
ODD = b'{"pool_id": 1 , "x":1e2,"x":\t2}'


class Gate:
    """Says yes to bodies with `pool`; `hold` makes it wait; `early` is sent before the engine is asked; counts what happened."""

    def __init__(self, *, hold: bool = False, outcome: object = None, early: bytes = b"") -> None:
        self.asked: list[RelayRequest] = []
        self.statuses: list[int] = []
        self.n_done = 0
        self.cancelled = threading.Event()
        self.planning = threading.Event()
        self.done = threading.Event()
        self._hold = hold
        self._outcome = outcome
        self._early = early

    def concerns(self, request: RelayRequest) -> bool:
        self.asked.append(request)
        return b"pool" in request.body

    counts = False

    async def count(self) -> Plan:
        raise AssertionError

    def objection(self, headers: Sequence[Header]) -> Refusal | None:
        return None

    async def plan(self, request: RelayRequest, waiting: StreamStart) -> Plan | Refusal:
        self.planning.set()
        if self._early:
            waiting(self._early)
        if self._hold:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if isinstance(self._outcome, Exception):
            raise self._outcome
        if isinstance(self._outcome, Refusal):
            return self._outcome
        return Plan([(b"x-polykv-seq", b"5.1")], self._reply_headers, self._done)

    def _reply_headers(self, status: int, headers: Sequence[Header]) -> Sequence[Header]:
        self.statuses.append(status)
        cached = [value for name, value in headers if name.lower() == b"x-polykv-shared"]
        return [(b"x-cached-prefix-tokens", cached[0] if cached else b"0")]

    def _done(self) -> None:
        self.n_done += 1
        self.done.set()


def test_a_plan_adds_headers_in_both_directions_and_leaves_the_body_alone() -> None:
    """The engine gets our headers and the exact body; the client gets the public header and none of the private ones."""
    gate = Gate()
    with (
        Stub(lambda _: reply(b"{}", extra=b"x-polykv-shared: 40\r\nX-Polykv-Slot: 1\r\n")) as stub,
        RelayRig(EngineAddress(port=stub.port), gate=gate) as rig,
    ):
        got = rig.send(request(b"POST", CHAT, ODD, b"X-Polykv-Seq: 9.9\r\nx-polykv-key: guess\r\n"))
        assert got.header(b"x-cached-prefix-tokens") == [b"40"]
        assert b"x-polykv" not in got.head.lower()
        assert stub.requests[0].header(b"x-polykv-seq") == [b"5.1"]
        assert stub.requests[0].header(b"x-polykv-key") == []
        assert stub.requests[0].body == ODD
        assert gate.done.wait(10)
        assert (gate.n_done, gate.statuses) == (1, [200])


@pytest.mark.parametrize(
    ("answer", "status", "end"),
    [
        ([SSE_HEAD + chunk(b"data: 1\n\n") + END], 200, b"data: 1\n\n"),
        (reply(b'{"error":{"message":"no","code":400}}', status=b"400 Bad Request"), 400, b'"message":"no"'),
    ],
)
def test_a_plan_is_told_of_a_reply_whose_stream_had_begun(answer: list[bytes], status: int, end: bytes) -> None:
    """The client has its head by then; the plan hears of the engine's all the same, once."""
    gate = Gate(early=b": waiting\n\n")
    with Stub(lambda _: answer) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig:
        got = rig.send(request(b"POST", CHAT, ODD))
        assert (got.status, got.complete) == (200, True)
        assert got.body.startswith(b": waiting\n\n")
        assert end in got.body
        assert gate.done.wait(10)
        assert (gate.n_done, gate.statuses) == (1, [status])


def test_whitespace_around_a_value_is_no_part_of_it() -> None:
    """The gate sees what the engine sees, which takes it off as well: a key is the same key."""
    gate = Gate()
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig:
        assert rig.send(request(b"POST", CHAT, b"{}", b"Authorization:  Bearer a b \t\r\nX-Empty: \r\n")).status == 200
        assert dict(gate.asked[0].headers)[b"Authorization"] == b"Bearer a b"
        assert stub.requests[0].header(b"authorization") == [b"Bearer a b"]
        assert b"\r\nX-Empty: \r\n" in stub.requests[0].head


def test_a_request_that_names_nothing_is_pumped_as_it_came() -> None:
    """The gate is asked once, with the whole body, and nothing is added."""
    gate = Gate()
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig:
        got = rig.send(request(b"POST", CHAT, b'{ "a":1 }'))
        assert got.head == b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
        assert stub.requests[0].head == request(b"POST", CHAT, b'{ "a":1 }').split(b"\r\n\r\n")[0] + b"\r\n\r\n"
        assert [asked.body for asked in gate.asked] == [b'{ "a":1 }']


@pytest.mark.parametrize("target", [b"/v1/embeddings", b"/slots/0?action=save", b"/tokenize"])
def test_other_routes_are_never_asked_about(target: bytes) -> None:
    """Only generating routes are scanned."""
    gate = Gate()
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig:
        assert rig.send(request(b"POST", target, b'{"pool_id":1}')).status == 200
        assert gate.asked == []


@pytest.mark.parametrize("leave", ["close", "reset"])
def test_a_client_that_leaves_cancels_the_decision(leave: str) -> None:
    """A plan that is still being made is cancelled and the engine is never asked."""
    gate = Gate(hold=True)
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig:
        client = rig.connect()
        client.send(request(b"POST", CHAT, ODD))
        assert gate.planning.wait(10)
        if leave == "close":
            client.sock.close()
        else:
            client.reset()
        assert gate.cancelled.wait(10)
        assert stub.requests == []


def test_a_client_that_leaves_in_mid_stream_ends_the_plan_once() -> None:
    """Departure after the head calls `done` exactly once."""
    gate = Gate()
    with Stub(lambda _: [SSE_HEAD, Do.ENDLESS]) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig:
        client = rig.connect()
        client.send(request(b"POST", CHAT, ODD))
        client.until(b"data: x")
        client.sock.close()
        assert gate.done.wait(10)
        assert stub.requests[0].peer_closed.wait(10)
    assert gate.n_done == 1


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Refusal(409, b'{"error":{}}', [(b"content-type", b"application/json")]), 409),
        (ApiError("pool_not_found", "no such pool"), 404),
        (RuntimeError("bug"), 500),
    ],
)
def test_a_refusal_is_answered_and_the_connection_goes_on(outcome: object, status: int) -> None:
    """The engine is not asked; the next request on the connection works."""
    gate = Gate(outcome=outcome)
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig, rig.connect() as client:
        client.send(request(b"POST", CHAT, ODD))
        assert client.reply().status == status
        client.send(request())
        assert client.reply().status == 200
        assert len(stub.requests) == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_a_413_that_the_client_can_read(chunked: bool) -> None:
    """The answer arrives although the client is still sending, and the engine sees nothing."""
    gate = Gate()
    body = b"x" * 300_000
    data = (
        request(b"POST", CHAT, body)
        if not chunked
        else b"POST " + CHAT + b" HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(body) + END
    )
    with (
        Stub(lambda _: reply()) as stub,
        RelayRig(EngineAddress(port=stub.port), gate=gate, limits=RelayLimits(scanned_body=100_000)) as rig,
        rig.connect() as client,
    ):
        client.send(data)
        got = client.reply()
        assert got.status == 413
        assert b"100000" in got.body
        assert stub.requests == []
        assert gate.asked == []


def test_a_body_in_tiny_chunks_is_kept_at_about_its_size() -> None:
    """However a client cuts what must be read whole: the cost of keeping it is that of its bytes, and it arrives as it was."""
    n = 100_000
    gate = Gate()
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig, rig.connect() as client:
        client.send(b"POST " + CHAT + b" HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n" + b"2\r\nab\r\n" * n)
        while not (kept := rig.on_loop(lambda: [list(one._parts) for one in rig.relay.running])) or sum(map(len, kept[0])) < 2 * n:
            rig.turn()
        assert sum(map(sys.getsizeof, kept[0])) < 4 * n
        client.send(chunk(b"c" * 5000) + chunk(b"d") + chunk(b"e") + END)
        assert client.reply().status == 200
        assert gate.asked[0].body == stub.requests[0].body == b"ab" * n + b"c" * 5000 + b"de"


def test_an_engine_that_dies_ends_the_plan() -> None:
    """No reply at all is a 503 and `done` was called."""
    gate = Gate()
    with Stub(lambda _: [Do.CLOSE]) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig:
        assert rig.send(request(b"POST", CHAT, ODD)).status == 503
        assert gate.n_done == 1


@pytest.mark.parametrize("dead", [False, True])
def test_a_lost_engine_is_said_before_the_plan_is_done(dead: bool) -> None:
    """A connection that breaks and one that is refused: whoever waits for this request's room knows of it first."""
    gate = Gate()
    plans_done: list[int] = []
    with Stub(lambda _: [Do.CLOSE]) as stub, RelayRig(EngineAddress(port=stub.port), gate=gate) as rig:
        rig.relay.on_lost = lambda: plans_done.append(gate.n_done)
        if dead:
            stub.stop()
        assert rig.send(request(b"POST", CHAT, ODD)).status == 503
        assert gate.done.wait(10)
    assert plans_done == [0]
