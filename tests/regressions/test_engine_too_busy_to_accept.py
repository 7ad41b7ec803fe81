"""An engine that is too busy to take connections for a while: its queue of them is full, which is no reason to refuse anybody."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polykv_proxy.ports import EngineAddress
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import reply

N_CLIENTS = 6
BUSY_S = 3.0


def serve(server: socket.socket) -> None:
    """Take connections, one request each."""
    while True:
        try:
            conn, _ = server.accept()
        except OSError:
            return
        with conn, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data and (more := conn.recv(65536)):
                data += more
            conn.sendall(reply(b'{"ok":1}', extra=b"Connection: close\r\n")[0])  # type: ignore[arg-type]


def test_all_wait_and_all_are_served() -> None:
    """Six at once before a queue of one that nobody empties for a while (real time: what was lost, was lost after a second)."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as server:
        path = Path(folder) / "e.sock"
        server.bind(str(path))
        server.listen(1)
        with RelayRig(EngineAddress(uds=str(path))) as relay, ThreadPoolExecutor(N_CLIENTS) as clients:
            asked = [clients.submit(relay.send, request(b"GET", b"/slots")) for _ in range(N_CLIENTS)]
            time.sleep(BUSY_S)
            assert relay.on_loop(lambda: len(relay.relay.running)) == N_CLIENTS
            taking = threading.Thread(target=serve, args=(server,))
            taking.start()
            assert [one.result().status for one in asked] == [200] * N_CLIENTS
            server.shutdown(socket.SHUT_RDWR)
            taking.join(20)
