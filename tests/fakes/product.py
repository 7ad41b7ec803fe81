"""The whole product on a tiny model: the proxy as a process, a client of it, and the engine behind it, asked directly.

Law: tests act through the proxy; the engine's own verbs serve to read what is true. Leaving checks that the proxy ends with 0.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.engine.driver import HANG_GUARD_S, Engine, Reply, ints, request_body
from tests.fakes.proxy_process import Served

LOOKS_S = 0.01
"""Between two looks: whoever asks without a pause takes the time from what it waits for."""


@dataclass
class Product:
    """A running proxy. `http` goes through it, `engine` past it."""

    served: Served
    http: httpx.Client
    engine: Engine

    def get(self, path: str) -> dict[str, Any]:
        return self.http.get(path).raise_for_status().json()

    def pool(self, **body: object) -> dict[str, Any]:
        """Create a pool and expect it."""
        reply = self.http.post("/polykv/pools", json=body)
        assert reply.status_code == 201, reply.text
        return reply.json()

    def fork(self, parent: object, **body: object) -> dict[str, Any]:
        """Fork a pool and expect it."""
        reply = self.http.post(f"/polykv/pools/{parent}/fork", json=body)
        assert reply.status_code == 201, reply.text
        return reply.json()

    def ask(self, prompt: object, n: int = 4, **body: object) -> Reply:
        """A greedy completion with log-probs; `n_shared` is what the proxy says."""
        reply = self.http.post("/completion", json=request_body(prompt, n, **body))
        assert reply.status_code == 200, reply.text
        return Reply(200, reply.json(), {**reply.headers, "x-polykv-shared": reply.headers.get("x-cached-prefix-tokens", "0")})

    def pool_tokens(self) -> list[int]:
        """Token ids that the engine holds for the only pool there is."""
        (entry,) = self.engine.state()["seqs"]
        return self.engine.seq_tokens(entry["seq"])

    def prompt_ids(self, path: str, body: dict[str, Any]) -> list[int]:
        """The ids that this route would prefill for this body, by the engine's dry run."""
        reply = self.engine.http.post(path, json=body, headers={"x-polykv-dry": "tokens"}).raise_for_status()
        n, *ids = ints(reply.content)
        assert n == len(ids)
        return ids

    def until(self, holds: Callable[[], object]) -> None:
        """Ask until it holds; only a hang ends it otherwise."""
        end = time.monotonic() + HANG_GUARD_S
        while not holds():
            assert time.monotonic() < end
            time.sleep(LOOKS_S)

    def kill_engine(self) -> None:
        """The engine dies; back when the next one serves and its pools are on."""
        before = self.get("/polykv/health")
        psutil.Process(before["pid"]).kill()

        def another() -> bool:
            now = self.get("/polykv/health")
            return now["state"] == "ready" and now["pools"].get("boot_id") not in {None, before["pools"]["boot_id"]}

        self.until(another)

    def settled(self) -> None:
        """Until no slot works and no request is booked."""
        self.until(lambda: (now := self.get("/polykv/capacity"))["slots_busy"] == 0 and now["n_requests"] == 0)

    def ask_and_wait(self, path: str, body: bytes, headers: bytes = b"") -> socket.socket:
        """Send a request on a connection of its own and read nothing."""
        host, port = self.served.url.removeprefix("http://").split(":")
        sock = socket.create_connection((host, int(port)), timeout=HANG_GUARD_S)
        head = b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
        sock.sendall(head % (path.encode(), headers, len(body)) + body)
        return sock


def leave(sock: socket.socket, *, reset: bool) -> None:
    """Go away by a normal close, or by a reset."""
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@contextmanager
def product(engine: Path, model: Path, folder: Path, *options: str, args: Sequence[str | int | Path]) -> Iterator[Product]:
    """Start proxy and engine, stop them in the end."""
    with Served(engine, model, folder, *options, args=[str(arg) for arg in ("-t", 1, *args)]) as served:
        with reached(served, engine, model) as proxy:
            yield proxy
        assert served.stop() == 0
        assert "Traceback" not in served.said, served.said


@contextmanager
def reached(served: Served, engine: Path, model: Path, key: str | None = None) -> Iterator[Product]:
    """A client of a proxy that runs, and of the engine behind it; `key` where the proxy did not start that."""
    behind = Engine(engine, model)
    behind.socket = Path(served.socket)
    key = key or psutil.Process(served.health["pid"]).environ()["LLAMA_ARG_POLYKV_KEY"]
    with (
        httpx.Client(base_url=served.url, trust_env=False, verify=False, timeout=HANG_GUARD_S) as http,
        behind.client({"x-polykv-key": key}) as behind.http,
    ):
        yield Product(served, http, behind)
