"""The engine dies, or stands still, with requests in every phase at once: each is told, nothing stays held, pools come back."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.product import Product, product
from tests.lengths import length
from tests.models import tiny_model

pytestmark = pytest.mark.engine

POOL = list(range(600, 700))
ARGS = ["-c", 16384, "-np", 3, "-kvu", "--cache-ram", 0, "-ub", 32, "-b", 32]
LONG: dict[str, Any] = {"n_predict": 100_000, "ignore_eos": True, "stream": True}
AWAY = {502, 503, 504}


class Phases:
    """One request in each phase. The three slots are taken by a stream with tokens, one with its first, and one that prefills."""

    def __init__(self, proxy: Product, workers: ThreadPoolExecutor) -> None:
        self.proxy = proxy
        self.idle = httpx.Client(base_url=proxy.served.url, trust_env=False, timeout=120)
        self.idle.get("/slots").raise_for_status()
        self.half_head = self._send(b"GET /slots HTTP/1.1\r\nHost: t\r\n")
        self.half_body = self._send(b"POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 500_000)
        self.streams = [workers.submit(self._stream, [*POOL, 11 + n], gate) for n, gate in enumerate(self._gates(2))]
        self.proxy.until(lambda: all(gate.is_set() for gate in self.gates))
        self.streams.append(workers.submit(self._stream, [n % 20_000 + 1000 for n in range(12_000)], threading.Event()))
        self.proxy.until(lambda: proxy.get("/polykv/capacity")["slots_busy"] == 3)
        self.queued = [workers.submit(self._queue, n) for n in range(2)]
        self.proxy.until(lambda: proxy.get("/polykv/health")["requests_running"] >= 6)

    def _gates(self, n: int) -> list[threading.Event]:
        self.gates = [threading.Event() for _ in range(n)]
        return self.gates

    def _send(self, data: bytes) -> socket.socket:
        host, port = self.proxy.served.url.removeprefix("http://").split(":")
        sock = socket.create_connection((host, int(port)), timeout=120)
        sock.sendall(data)
        return sock

    def _stream(self, prompt: list[int], begun: threading.Event) -> tuple[int, list[dict[str, Any]]]:
        body = {**LONG, "prompt": prompt, "pool_id": "p", "session_id": f"s{prompt[-1]}"}
        with self.proxy.http.stream("POST", "/completion", json=body) as reply:
            events = []
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))
                    begun.set()
                elif line.startswith("{"):
                    events.append(json.loads(line))
            return reply.status_code, events

    def _queue(self, n: int) -> httpx.Response:
        return self.proxy.http.post("/completion", json={"prompt": [*POOL, 300 + n], "n_predict": 3, "pool_id": "p"})

    def all_are_told(self) -> None:
        """Streams by one error event or a status, the queued by a status or an answer, and no connection is left in the dark."""
        for stream in self.streams:
            status, events = stream.result()
            assert status == 200 or status in AWAY
            assert ["error" in event for event in events].index(True) == len(events) - 1
        for reply in (one.result() for one in self.queued):
            assert reply.status_code == 200 or (reply.status_code in AWAY and reply.json()["error"]["message"])
        with self.half_body as sock:
            assert int(sock.recv(65536).split(b" ", 2)[1]) in AWAY
        with self.half_head as sock:
            sock.sendall(b"\r\n")
            assert int(sock.recv(65536).split(b" ", 2)[1]) in {200, *AWAY}
        assert self.idle.get("/slots").status_code in {200, *AWAY}
        self.idle.close()


def all_is_given_back(proxy: Product, boot_before: str, n_restarts: int) -> None:
    """The next engine serves, the pool is rebuilt under its id and shared whole, and nobody holds anything."""

    def another() -> bool:
        health = proxy.get("/polykv/health")
        return health["state"] == "ready" and health["pools"].get("boot_id") not in {None, boot_before}

    proxy.until(another)
    assert proxy.get("/polykv/health")["restarts"] == n_restarts
    reply = proxy.http.post("/completion", json={"prompt": [*POOL, 7], "n_predict": 2, "pool_id": "p"})
    assert (reply.status_code, reply.headers["x-cached-prefix-tokens"], reply.headers["x-pool-id"]) == (200, str(len(POOL)), "1")
    proxy.settled()
    capacity = proxy.get("/polykv/capacity")
    assert [capacity[key] for key in ("slots_busy", "n_requests", "seq_ids_used")] == [0, 0, 1]
    assert proxy.get("/polykv/pools/p")["n_running"] == 0
    assert proxy.get("/polykv/health")["requests_running"] == 0


@pytest.mark.parametrize("signum", length([signal.SIGKILL, signal.SIGSTOP], [signal.SIGSEGV, signal.SIGKILL, signal.SIGSTOP]))
def test_each_request_is_told_and_pools_come_back(engine_path: Path, tmp_path: Path, signum: int) -> None:
    """Head half sent, body half sent, queued, in its prefill, after its first token, in mid-stream, and a connection at rest."""
    options = ["--no-progress-s", "2", "--stop-grace-s", "0.2"]
    with product(engine_path, tiny_model("full"), tmp_path, *options, args=ARGS) as proxy, ThreadPoolExecutor(5) as workers:
        proxy.pool(tokens=POOL, name="p")
        health = proxy.get("/polykv/health")
        phases = Phases(proxy, workers)
        os.kill(health["pid"], signum)
        phases.all_are_told()
        all_is_given_back(proxy, health["pools"]["boot_id"], 1)


def test_an_engine_that_was_stopped_goes_on(engine_path: Path, tmp_path: Path) -> None:
    """Without a limit nobody is ended: stopped for a while and continued, a stream and an answer are whole."""
    with product(engine_path, tiny_model("full"), tmp_path, args=ARGS) as proxy, ThreadPoolExecutor(2) as workers:
        pid = proxy.get("/polykv/health")["pid"]

        def ask(**more: object) -> Callable[[], httpx.Response]:
            return lambda: proxy.http.post("/completion", json={"prompt": POOL, "n_predict": 300, "ignore_eos": True, **more})

        os.kill(pid, signal.SIGSTOP)
        try:
            asked: list[Future[Any]] = [workers.submit(ask(stream=True)), workers.submit(ask())]
            proxy.until(lambda: proxy.get("/polykv/health")["requests_running"] == 2)
        finally:
            os.kill(pid, signal.SIGCONT)
        streamed, whole = (one.result() for one in asked)
        assert whole.json()["tokens_predicted"] == 300
        assert json.loads(streamed.text.strip().rsplit("\n\n", 1)[1][6:])["tokens_predicted"] == 300
        assert proxy.get("/polykv/health")["restarts"] == 0
