"""Mixed traffic from several clients, and two dozen that watch: no answer of 5xx, nothing grows, and everything comes back.

Law: every client owns its pools and sessions, so that each answer has one right status. Run by `scripts/soak`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.soak_watchers import BrokenError, Follower, Scraper, Sleeper, Visitor, Watcher
from tests.fakes.product import Product, leave, product
from tests.models import tiny_model

ARGS = ("-c", 8192, "-np", 4, "-kvu", "--cache-ram", 16)
N_CLIENTS = 4
N_FOLLOWERS = 10
N_SLEEPERS = 2
STREAMS = ("/polykv/tps?interval_ms=100", "/polykv/events")
"""So many of each kind on each stream."""
N_SAMPLES = 24
GROWTH = 1.05
GROWTH_BYTES = 16 << 20
GROWTH_FILES = 8


class Client:
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
        if not json.loads(last.removeprefix("data: "))["stop"]:
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


@dataclass
class Gauge:
    """Memory and open files of one process over time."""

    name: str
    process: psutil.Process
    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def sample(self) -> str:
        self.memory.append(self.process.memory_info().rss)
        self.files.append(self.process.num_fds())
        return f"{self.name} {self.memory[-1] >> 20} MiB, {self.files[-1]} files, {self.process.num_threads()} threads"

    def check(self) -> None:
        """The last third is not above the second one."""
        third = len(self.memory) // 3
        before, after = (statistics.median(self.memory[i * third : (i + 1) * third]) for i in (1, 2))
        if after > before * GROWTH + GROWTH_BYTES:
            raise BrokenError(f"{self.name} grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB")
        before, after = (statistics.median(self.files[i * third : (i + 1) * third]) for i in (1, 2))
        if after > before + GROWTH_FILES:
            raise BrokenError(f"{self.name} went from {before} to {after} open files")


def soak(proxy: Product, seconds: float) -> tuple[Counter[tuple[str, int]], Counter[str]]:
    """Requests by what they were and how they ended, and what each kind of watcher has seen."""
    clients = [Client(proxy, number) for number in range(N_CLIENTS)]
    gauges = [Gauge("proxy", psutil.Process(proxy.served.process.pid)), Gauge("engine", psutil.Process(proxy.served.health["pid"]))]
    over, broken = threading.Event(), list[BaseException]()

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # it is raised again below
                broken.append(error)
                over.set()

        return threading.Thread(target=run)

    def acting(client: Client) -> Callable[[], None]:
        def work() -> None:
            while not over.is_set():
                client.act()

        return work

    watchers: list[Watcher] = [
        *(Follower(proxy, path, over) for path in STREAMS for _ in range(N_FOLLOWERS)),
        *(Sleeper(proxy, path, over) for path in STREAMS for _ in range(N_SLEEPERS)),
        Visitor(proxy, over),
        Scraper(proxy, over),
    ]
    watching = [guarded(watcher.watch) for watcher in watchers]
    threads = [guarded(acting(client)) for client in clients]
    for thread in (*watching, *threads):
        thread.start()
    started = time.monotonic()
    for _ in range(N_SAMPLES):
        if over.wait(seconds / N_SAMPLES):
            break
        n = sum(sum(client.statuses.values()) for client in clients)
        print(f"{time.monotonic() - started:6.0f} s  {n:7} requests  " + "  ".join(gauge.sample() for gauge in gauges), flush=True)
    over.set()
    for thread in threads:
        thread.join()
    if broken:
        raise broken[0]
    for gauge in gauges:
        gauge.check()
    give_back(proxy)
    for thread in watching:  # each was told of what was given back
        thread.join()
    if broken:
        raise broken[0]
    return sum((client.statuses for client in clients), Counter()), seen_by(watchers)


def seen_by(watchers: Iterable[Watcher]) -> Counter[str]:
    found = Counter[str]()
    for watcher in watchers:
        found[type(watcher).__name__.lower()] += watcher.n_seen
    return found


def give_back(proxy: Product) -> None:
    """Release everything; then nobody holds anything."""
    proxy.settled()
    for session in proxy.get("/polykv/sessions")["sessions"]:
        proxy.http.delete(f"/polykv/sessions/{session['session_id']}")
    for pool in proxy.get("/polykv/pools")["pools"]:
        proxy.http.delete(f"/polykv/pools/{pool['pool_id']}")
    proxy.settled()
    left = {key: proxy.get("/polykv/capacity")[key] for key in ("seq_ids_used", "n_requests", "n_sessions")}
    state = proxy.engine.state()
    if any(left.values()) or state["seqs"] or any(slot["n_shared"] for slot in state["slots"]):
        raise BrokenError(f"something is left: {left}, {state}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800, help="how long (default 1800)")
    parser.add_argument("--engine", type=Path, default=Path(__file__).parents[2] / "llamafile", help="the engine binary")
    options = parser.parse_args()
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="polykv-soak-") as folder,
        product(options.engine, tiny_model("full"), Path(folder), args=ARGS) as proxy,
    ):
        try:
            counts, seen = soak(proxy, options.seconds)
        except BrokenError as error:
            print(f"broken: {error}", file=sys.stderr)
            proxy.served.process.kill()
            return 1
    print(f"nothing grew and nothing is left after {time.monotonic() - started:.0f} s: {sum(counts.values())} requests")
    for (what, status), n in sorted(counts.items()):
        print(f"  {what:12} {status or '':4} {n}")
    print("seen: " + ", ".join(f"{n} by {who}s" for who, n in seen.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
