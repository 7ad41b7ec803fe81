"""The engine goes away before it has read a request: its door opens and shuts, its head is cut short, its body is not taken."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request

BODY = b"x" * (8 << 20)
NOW, IN_THE_HEAD, IN_THE_BODY = 0, 10, 100_000
"""How many bytes of a connection are read before it ends."""


@contextmanager
def hasty(n_bytes: int, *, reset: bool) -> Iterator[tuple[int, list[bytes]]]:
    """An engine whose every connection ends after so many bytes: its port, and what it has read."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    conn, _ = server.accept()
                except OSError:
                    return
                with conn:
                    data = b""
                    while len(data) < n_bytes and (more := conn.recv(min(65536, n_bytes - len(data)))):
                        data += more
                    seen.append(data)
                    if reset:
                        conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], seen
        server.shutdown(socket.SHUT_RDWR)
    thread.join(20)


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("n_bytes", [NOW, IN_THE_HEAD, IN_THE_BODY])
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/embeddings"], ids=["generating", "other"])
def test_it_is_a_503_and_was_sent_once(path: bytes, n_bytes: int, reset: bool) -> None:
    """A request with a large body: told to come again, sent to one connection only, and the next one on a new connection is too."""
    with hasty(n_bytes, reset=reset) as (port, seen), RelayRig(EngineAddress(port=port)) as relay:
        for n in (1, 2):
            got = relay.send(request(b"POST", path, BODY))
            assert (got.status, json.loads(got.body)["error"]["code"]) == (503, "engine_unavailable")
            assert int(got.header(b"retry-after")[0]) >= 1
            assert relay.on_loop(lambda: len(relay.relay.running)) == 0
            assert len(seen) == n
        assert relay.on_loop(lambda: relay.pool.n_open) == 0
