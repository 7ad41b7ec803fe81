"""The engine answers before it has read the whole body, and closes: the client gets that answer, though our writing failed."""

from __future__ import annotations

import threading
from pathlib import Path

from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig
from tests.fakes.stub_engine import Do, Seen, Step, Stub, reply


def test_the_last_words_of_a_closed_connection_are_heard(tmp_path: Path) -> None:
    """One turn of the loop in which the answer comes, the connection closes, and more of the body is written."""
    go = threading.Event()

    def script(_: Seen) -> list[Step]:
        assert go.wait(20)
        return [*reply(b'{"too":"long"}', status=b"404 Not Found"), Do.CLOSE]

    path = tmp_path / "engine.sock"
    with Stub(script, path=path, read_body=False) as stub, RelayRig(EngineAddress(uds=str(path))) as rig, rig.connect() as client:
        client.send(b"POST /nothing HTTP/1.1\r\nHost: t\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1000)
        seen = stub.wait_requests(1)

        def answered_and_written_to() -> None:
            (exchange,) = rig.relay.running
            go.set()
            assert seen.finished.wait(20)
            exchange.feed(b"x" * 1000)

        rig.on_loop(answered_and_written_to)
        got = client.reply()
        assert (got.status, got.body) == (404, b'{"too":"long"}')
