"""F030: a client that leaves never keeps the engine computing, and never costs a connection of the pool."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from polykv_proxy.api.relay import UpstreamPool
from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import Client, RelayRig, request
from tests.fakes.stub_engine import SSE_HEAD, Do, Script, Seen, Stub, reply
from tests.lengths import length

ROUNDS = length(12, 50)
CHAT = request(b"POST", b"/v1/chat/completions", b'{"stream":true}')

SCRIPTS: dict[bytes, Script] = {
    b"before": [Do.HANG],
    b"after-head": [SSE_HEAD, Do.HANG],
    b"mid-body": [SSE_HEAD, Do.ENDLESS],
    b"not-reading": [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n", Do.FLOOD],
    b"slow-whole": [20.0, *reply(b"{}")],
    b"error-429": [b"HTTP/1.1 429 Too Many\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n", Do.ENDLESS],
    b"error-500": [b"HTTP/1.1 500 Oops\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n", Do.ENDLESS],
}
NO_HEAD = {b"before", b"slow-whole"}


def _script(seen: Seen) -> Script:
    return SCRIPTS.get(seen.header(b"x-mode")[0], reply(b'{"ok":1}')) if seen.header(b"x-mode") else reply(b'{"ok":1}')


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("mode", list(SCRIPTS))
def test_the_engine_sees_the_peer_leave_and_the_pool_stays_usable(mode: bytes, leave: str) -> None:
    """However and whenever a client leaves, the engine's connection closes and the next request works at once."""
    with Stub(_script) as stub, RelayRig(EngineAddress(port=stub.port), pool=lambda: UpstreamPool(max_open=4)) as rig:
        for n in range(ROUNDS):
            client = Client(rig.port, rcvbuf=4096 if mode == b"not-reading" else None)
            client.send(request(b"POST", b"/v1/chat/completions", b'{"stream":true}', b"X-Mode: %b\r\n" % mode))
            seen = stub.wait_requests(n + 1)
            if mode not in NO_HEAD:
                client.until(b"\r\n\r\n")
            if leave == "reset":
                client.reset()
            else:
                client.sock.close()
            assert seen.peer_closed.wait(10), f"round {n}: the engine never saw the client leave"
        after = rig.send(request())
        assert after.status == 200
        assert after.body == b'{"ok":1}'
        assert rig.on_loop(lambda: len(rig.relay.running)) == 0


@pytest.mark.parametrize("unix", [True, False])
def test_a_client_that_leaves_while_its_bytes_are_not_read_is_noticed(unix: bool) -> None:
    """An upload that the engine does not take holds the client back; its reset is still passed on at once."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "e.sock" if unix else None
        with Stub(lambda _: [Do.STALL], read_body=False, path=path) as stub:
            address = EngineAddress(uds=str(path)) if unix else EngineAddress(port=stub.port)
            with RelayRig(address) as rig:
                client = Client(rig.port)
                client.sock.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    client.send(request(b"POST", b"/v1/embeddings", b"x" * (64 << 20)))
                assert rig.on_loop(lambda: len(rig.relay.running)) == 1
                client.reset()
                assert stub.requests[0].peer_closed.wait(10)
                assert rig.on_loop(lambda: len(rig.relay.running)) == 0
