"""llama-server closes its connection after a chunked reply although it says keep-alive: the next POST must not meet that."""

from __future__ import annotations

from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import Stub

CHAT = request(b"POST", b"/v1/chat/completions", b"{}")
STREAM = (
    b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=100\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n0\r\n\r\n"
)


def test_a_connection_is_not_used_again_after_a_chunked_reply() -> None:
    """Two streams of one client, one right after the other, use two connections to the engine."""
    with Stub(lambda _: [STREAM]) as stub, RelayRig(EngineAddress(port=stub.port)) as rig, rig.connect() as client:
        for _ in range(2):
            client.send(CHAT)
            assert client.reply().status == 200
        assert [seen.connection for seen in stub.requests] == [1, 2]
