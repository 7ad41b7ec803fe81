"""F072: a websocket handshake gets a prompt JSON answer, after which plain HTTP works; other upgrade offers are declined."""

from __future__ import annotations

import json
import threading

import pytest

from polykv_proxy.api.relay import RelayLimits
from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import Script, Stub, reply

WEBSOCKET = b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n"


@pytest.mark.parametrize("path", [b"/v1/responses", b"/v1/chat/completions", b"/", b"/polykv/ping"])
def test_a_handshake_is_426_and_the_connection_goes_on(path: bytes) -> None:
    """The same connection then serves a POST, and the engine never saw the handshake."""
    with Stub(lambda _: reply(b'{"ok":1}')) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        client.send(request(b"GET", path, extra=WEBSOCKET))
        refused = client.reply()
        assert refused.status == 426
        assert json.loads(refused.body)["error"]["code"] == "upgrade_refused"
        client.send(request(b"POST", b"/v1/responses", b"{}"))
        assert client.reply().body == b'{"ok":1}'
        assert len(stub.requests) == 1
        assert rig.on_loop(lambda: len(rig.relay.running)) == 0


def test_an_h2c_offer_on_a_post_is_declined_silently() -> None:
    """The POST is served, nothing of the offer is sent on, and the next request on the connection is in step."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        client.send(request(b"POST", b"/v1/chat/completions", b'{"a":1}', offer) + request())
        assert client.reply().status == 200
        assert client.reply().status == 200
        first, second = stub.requests
        assert first.body == b'{"a":1}'
        assert b"upgrade" not in first.head.lower()
        assert b"http2" not in first.head.lower()
        assert second.method == b"GET"


@pytest.mark.parametrize("offer", [WEBSOCKET, b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_thousands_of_offers_in_a_row_do_not_nest(offer: bytes) -> None:
    """However many are read at once, each is answered in its turn, and the request behind them."""
    n = 1500
    with Stub(lambda _: reply()) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        threading.Thread(target=client.send, args=(request(b"GET", b"/_polykv", extra=offer) * n + request(),), daemon=True).start()
        assert {client.reply().status for _ in range(n)} <= {404, 426}
        assert client.reply().status == 200
        assert len(stub.requests) == 1


def test_offers_that_come_one_by_one_are_read_ahead_within_bounds() -> None:
    """While an answer is awaited no more of them are kept than of other requests."""
    go = threading.Event()

    def script(_: object) -> Script:
        go.wait(30)
        return reply()

    limits = RelayLimits(pipelined=4)
    with Stub(script) as stub, RelayRig(EngineAddress(port=stub.port), limits=limits) as rig, rig.connect() as client:
        client.send(request())
        for n in range(6):
            client.send(request(b"GET", b"/", extra=WEBSOCKET))
            rig.turn()
            assert rig.on_loop(lambda: len(next(iter(rig.relay.running)).client.pipeline)) == min(n + 1, 4)
        go.set()
        assert [client.reply().status for _ in range(7)] == [200, *[426] * 6]
