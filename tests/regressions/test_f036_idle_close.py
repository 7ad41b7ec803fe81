"""F036: a connection that the engine has just closed never costs a request, and no POST runs twice."""

from __future__ import annotations

import time

import pytest

from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import Do, Stub, reply
from tests.lengths import length

CHAT = request(b"POST", b"/v1/chat/completions", b"{}")
N_REQUESTS = length(6, 300)


@pytest.mark.parametrize("close_on_reuse", [False, True])
def test_gets_and_posts_survive_idle_close(close_on_reuse: bool) -> None:
    """Slow alternating GETs and POSTs all succeed, whether the engine closes idle connections or on their next use."""
    stub = Stub(lambda _: reply(), keep_idle_s=0.6, close_on_reuse=close_on_reuse)
    with stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        for n in range(N_REQUESTS):
            client.send(CHAT if n % 2 else request())
            assert client.reply().status == 200
            time.sleep(0.55 + 0.02 * (n % 6))  # around the moment at which the engine closes: the fault needs real idleness
        posts = [seen for seen in stub.requests if seen.method == b"POST"]
        assert len(posts) == N_REQUESTS // 2


def test_a_get_is_sent_once_more_and_a_post_never() -> None:
    """When a reused connection dies without a byte of reply, GET is repeated on a new one; POST is a 503 and ran once at most."""
    with (
        Stub(lambda seen: [Do.CLOSE] if seen.header(b"x-die") and stub.requests[-1].connection == 1 else reply()) as stub,
        RelayRig(EngineAddress(port=stub.port)) as rig,
        rig.connect() as client,
    ):
        client.send(request())
        assert client.reply().status == 200
        client.send(request(extra=b"X-Die: 1\r\n"))
        assert client.reply().status == 200
        assert [seen.connection for seen in stub.requests] == [1, 1, 2]

    with (
        Stub(lambda seen: [Do.CLOSE] if seen.method == b"POST" else reply()) as stub,
        RelayRig(EngineAddress(port=stub.port)) as rig,
        rig.connect() as client,
    ):
        client.send(request())
        assert client.reply().status == 200
        client.send(CHAT)
        died = client.reply()
        assert died.status == 503
        assert died.header(b"retry-after") == [b"1"]
        assert len([seen for seen in stub.requests if seen.method == b"POST"]) == 1
