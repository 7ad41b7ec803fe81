"""Clients that own pools and sessions: they make and release them, use them, and leave in the middle.

Law: every client owns what it names, so that each answer has one right status.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.e2e.soak_watchers import BrokenError
from tests.fakes.product import Product, leave


class Owner:
    """One client: acts at random on pools and sessions of its own."""

    def __init__(self, proxy: Product, number: int) -> None:
        self.proxy, self.number, self.rng = proxy, number, random.Random(number)
        self.pools: dict[str, list[int]] = {}
        self.n_pools = self.n_brief = 0
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.acts: list[tuple[int, Callable[[], None]]] = [
            (3, self.create), (2, self.delete), (12, self.attach), (6, self.stream), (4, self.leave), (4, self.plain),
            (2, self.end_session), (2, self.look), (1, self.bad), (4, self.brief),
        ]  # fmt: skip

    def act(self) -> None:
        weights, acts = zip(*self.acts, strict=True)
        self.rng.choices(acts, weights)[0]()

    def expect(self, what: str, status: int, *right: int) -> None:
        self.statuses[what, status] += 1
        if status not in right:
            raise BrokenError(f"{what}: status {status}, not one of {right}")

    def session(self) -> str:
        return f"c{self.number}-{self.rng.randrange(2)}"

    def prompt(self, name: str) -> list[int]:
        return [*self.pools[name], *(self.rng.randrange(300, 900) for _ in range(self.rng.randrange(1, 20)))]

    def body(self, **more: object) -> dict[str, Any]:
        """A request on one of the client's pools, or on none."""
        n = self.rng.randrange(1, 24)
        if not self.pools:
            return {"prompt": [self.rng.randrange(300, 900) for _ in range(30)], "n_predict": n, **more}
        name = self.rng.choice(sorted(self.pools))
        return {"prompt": self.prompt(name), "n_predict": n, "pool_id": name, "session_id": self.session(), **more}

    def create(self) -> None:
        if len(self.pools) < 2:
            name = f"p{self.number}-{self.n_pools}".replace("-", "_")
            self.n_pools += 1
            tokens = [1000 + self.number, self.n_pools % 20000 + 2000, *range(300, 300 + self.rng.randrange(20, 200))]
            self.expect("create", self.proxy.http.post("/polykv/pools", json={"tokens": tokens, "name": name}).status_code, 201)
            self.pools[name] = tokens

    def delete(self) -> None:
        if self.pools:
            name = self.rng.choice(sorted(self.pools))
            del self.pools[name]
            self.expect("delete", self.proxy.http.delete(f"/polykv/pools/{name}").status_code, 200, 202)

    def attach(self) -> None:
        self.expect("attach", self.proxy.http.post("/completion", json=self.body()).status_code, 200)

    def stream(self) -> None:
        with self.proxy.http.stream("POST", "/completion", json=self.body(stream=True)) as reply:
            last = [line for line in reply.iter_lines() if line][-1]
        self.expect("stream", reply.status_code, 200)
        if not json.loads(last.removeprefix("data: ")).get("stop_type"):
            raise BrokenError(f"a stream ended early: {last}")

    def leave(self) -> None:
        body = json.dumps(self.body(stream=True, n_predict=500, ignore_eos=True)).encode()
        sock = self.proxy.ask_and_wait("/completion", body)
        if self.rng.random() < 0.7:
            sock.recv(1024)
        leave(sock, reset=self.rng.random() < 0.5)
        self.statuses["leave", 0] += 1

    def plain(self) -> None:
        messages = [{"role": "user", "content": f"hello {self.rng.random()}"}]
        reply = self.proxy.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8})
        self.expect("plain", reply.status_code, 200)

    def end_session(self) -> None:
        self.expect("end session", self.proxy.http.delete(f"/polykv/sessions/{self.session()}").status_code, 200, 404)

    def brief(self) -> None:
        """A session of a few seconds, under a name that nobody had before."""
        self.n_brief += 1
        name = f"brief-{self.number}-{self.n_brief}"
        self.expect("brief", self.proxy.http.post("/completion", json={**self.body(), "session_id": name}).status_code, 200)
        self.expect("brief", self.proxy.http.delete(f"/polykv/sessions/{name}").status_code, 200)

    def look(self) -> None:
        for path in ("/polykv/pools", "/polykv/sessions", "/polykv/capacity", "/polykv/health", "/polykv/savings", "/slots"):
            self.expect("look", self.proxy.http.get(path).status_code, 200)

    def bad(self) -> None:
        self.expect("bad", self.proxy.http.post("/polykv/pools", json={"tokens": []}).status_code, 400)
        self.expect("bad", self.proxy.http.post("/completion", json={"prompt": "x", "pool_id": "nobody"}).status_code, 404)
