"""F020: streams that are left at any point, queued ones too, leave no slot, no queue place and no hold on their pool behind."""

from __future__ import annotations

import json
import random
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engine.tree import tokens
from tests.fakes.product import Product, leave, product
from tests.lengths import length
from tests.models import tiny_model

pytestmark = pytest.mark.engine

N_ROUNDS = length(20, 40)
"""Of five clients each, on four slots."""
N_SLOTS = 4
N_TOKENS = 40
POOL = tokens(80, 1)


def stream(proxy: Product, n: int, n_tokens: int) -> socket.socket:
    body = {"prompt": [*POOL, 300 + n], "n_predict": n_tokens, "ignore_eos": True, "stream": True, "pool_id": "p"}
    return proxy.ask_and_wait("/completion", json.dumps(body).encode())


def read_to(sock: socket.socket, point: bytes, n: int) -> None:
    """Until the point has been seen so many times."""
    seen = b""
    while seen.count(point) < n:
        data = sock.recv(65536)
        assert data, seen[-300:]
        seen += data


@pytest.mark.timeout(600)
def test_left_streams_leave_nothing(engine_path: Path, tmp_path: Path) -> None:
    """Left at once, queued, after the head, in mid-body and before the last event, by close or reset; then four start at once."""
    dice = random.Random(1)
    with product(engine_path, tiny_model("full"), tmp_path, args=["-c", 4096, "-np", N_SLOTS, "--cache-ram", 0]) as proxy:
        proxy.pool(tokens=POOL, name="p")
        for _ in range(N_ROUNDS):
            clients = [stream(proxy, n, N_TOKENS) for n in range(N_SLOTS + 1)]
            points = [(b"", 0), (b"\r\n\r\n", 1), (b"data: ", 1), (b"data: ", N_TOKENS // 2), (b"data: ", N_TOKENS - 1)]
            dice.shuffle(clients)
            for client, (point, n) in zip(clients, points, strict=True):
                read_to(client, point, n)
                leave(client, reset=dice.random() < 0.5)
        proxy.settled()
        capacity = proxy.get("/polykv/capacity")
        assert [capacity[key] for key in ("slots_busy", "n_requests", "n_sessions", "seq_ids_used")] == [0, 0, 0, 1]
        assert (proxy.get("/polykv/pools/p")["n_running"], proxy.engine.state()["cells"]["used"] >= len(POOL)) == (0, True)
        with ExitStack() as open_sockets:
            for n in range(N_SLOTS):
                open_sockets.callback(leave, stream(proxy, n, 900), reset=False)
            proxy.until(lambda: [slot["state"] for slot in proxy.engine.state()["slots"]] == ["generating"] * N_SLOTS)
        proxy.settled()
        assert proxy.http.post("/polykv/pools/p/evict").json()["evicted"] is True
