"""How relayed requests are counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from polykv_proxy.core.tally import Ending, RelayTally, Route
from polykv_proxy.errors import ApiError
from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import END, SSE_HEAD, Do, Seen, Step, Stub, chunk, reply

BODY = b"{}"


def script(seen: Seen) -> list[Step]:
    """Behaves as the query says."""
    what = seen.target.partition(b"?")[2]
    if what == b"error":
        return reply(status=b"400 Bad Request")
    if what == b"lost":
        return [SSE_HEAD, chunk(b"data: 1\n\n"), Do.CLOSE]
    if what == b"hang":
        return [SSE_HEAD, chunk(b"data: 1\n\n"), Do.HANG]
    return [SSE_HEAD, chunk(b"data: 1\n\n"), END]


def until(rig: RelayRig, holds: Callable[[], bool]) -> None:
    """Ask the relay's loop until it holds; only a hang ends it otherwise."""
    end = time.monotonic() + 20
    while not rig.on_loop(holds):
        assert time.monotonic() < end


@contextmanager
def relay() -> Iterator[tuple[RelayRig, RelayTally]]:
    with Stub(script) as stub, RelayRig(EngineAddress(port=stub.port)) as rig:
        yield rig, rig.relay.tally


def test_every_request_is_counted_once_by_route_and_ending() -> None:
    """Complete, the engine's error, refused and lost each make one count, under the kind of their path."""
    with relay() as (rig, tally):
        rig.send(request(b"POST", b"/v1/chat/completions", body=BODY))
        rig.send(request(b"POST", b"/v1/messages?error", body=BODY))
        rig.send(request(b"GET", b"/slots?lost"))
        rig.send(request(b"GET", b"/_polykv/v1/state"))
        assert rig.on_loop(lambda: dict(tally.ended)) == {
            (Route.CHAT, Ending.COMPLETE): 1,
            (Route.MESSAGES, Ending.ENGINE_ERROR): 1,
            (Route.OTHER, Ending.ENGINE_LOST): 1,
            (Route.OTHER, Ending.REFUSED): 1,
        }


def test_a_client_that_leaves_and_a_cut_are_told_apart() -> None:
    """Who ended a stream half way is what is counted."""
    with relay() as (rig, tally):
        with rig.connect() as client:
            client.send(request(b"POST", b"/completion?hang", body=BODY))
            client.until(b"data: 1")
        until(rig, lambda: tally.ended.total() == 1)
        with rig.connect() as client:
            client.send(request(b"POST", b"/completion?hang", body=BODY))
            client.until(b"data: 1")
            rig.on_loop(lambda: rig.relay.cut("draining", "over"))
            until(rig, lambda: tally.ended.total() == 2)
        assert dict(tally.ended) == {(Route.COMPLETIONS, Ending.CLIENT_GONE): 1, (Route.COMPLETIONS, Ending.CUT): 1}


def test_a_body_that_is_too_large_is_a_refusal() -> None:
    """What the proxy does not take is refused, also when it was on its way already."""
    with relay() as (rig, tally):
        error = ApiError("body_too_large", "too large")

        def spoil() -> None:
            for exchange in list(rig.relay.running):
                exchange.spoil(error)

        with rig.connect() as client:
            client.send(b"POST /completion?hang HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
            until(rig, lambda: len(rig.relay.running) == 1)
            rig.on_loop(spoil)
            until(rig, lambda: tally.ended.total() == 1)
        assert dict(tally.ended) == {(Route.COMPLETIONS, Ending.REFUSED): 1}


def test_what_the_relay_adds_is_measured_for_each_request_that_it_sends() -> None:
    """A request that goes to the engine is one measurement, a refused one none."""
    with relay() as (rig, tally):
        for _ in range(3):
            rig.send(request(b"POST", b"/completion", body=BODY))
        rig.send(request(b"GET", b"/_polykv/v1/state"))
        assert rig.on_loop(lambda: (tally.delay_s.count, tally.plan_s.count)) == (3, 0)
