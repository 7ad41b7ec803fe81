"""Every node of a deep and wide tree answers right through the whole product, whatever has happened to the engine meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.driver import Engine
from tests.engine.judge import LEAST_PLAIN, assert_equal, noise_floor
from tests.engine.tree import TAILS, Node, shape, tokens
from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine


class Grove:
    """The tree of tests/engine/tree.py as pools; `clean` is an unpatched engine. A check asks a third of them, in turns."""

    def __init__(self, proxy: Product, clean: Engine) -> None:
        self.proxy, self.clean, self.nodes, self.n_checks = proxy, clean, shape(1), 0
        self.floor = noise_floor(clean)
        self.pools: list[int] = []
        for node in self.nodes:
            self.pools.append(self.grow(node))

    def grow(self, node: Node) -> int:
        if node.parent is None:
            return int(self.proxy.pool(tokens=node.tokens)["pool_id"])
        parent = self.pools[self.nodes.index(node.parent)]
        if not node.snapshot:
            made = self.proxy.fork(parent, tokens=node.tokens, branch_pos=node.branch_pos)
            assert made["n_shared"] <= made["branch_pos"] == node.branch_pos
            return int(made["pool_id"])
        self.proxy.ask(node.tokens, 6, pool_id=parent, session_id="snap", ignore_eos=True)
        made = self.proxy.fork(parent, from_session="snap", branch_pos=node.branch_pos)
        self.proxy.http.delete("/polykv/sessions/snap")
        node.tokens = self.proxy.get(f"/polykv/pools/{made['pool_id']}/tokens")["tokens"]
        return int(made["pool_id"])

    def check(self) -> None:
        """A request from an empty slot shares all of its pool, and is answered as by the other engine without any cache."""
        self.n_checks += 1
        for i in range(self.n_checks % 3, len(self.nodes), 3):
            prompt = [*self.nodes[i].tokens, *tokens(TAILS[i % len(TAILS)], 900 + i)]
            reply = self.proxy.ask(prompt, pool_id=self.pools[i], session_id="check")
            self.proxy.http.delete("/polykv/sessions/check")
            assert reply.n_shared == len(self.nodes[i].tokens), (i, reply.body["opencoti"])
            assert_equal(reply, self.clean.fresh(prompt), self.floor, LEAST_PLAIN)

    def post(self, i: int, verb: str) -> None:
        reply = self.proxy.http.post(f"/polykv/pools/{self.pools[i]}/{verb}")
        assert reply.status_code == 200, reply.text


@contextmanager
def company(grove: Grove) -> Iterator[None]:
    """Three other sessions decode all the time."""
    stop = threading.Event()

    def decode(i: int) -> None:
        while not stop.is_set():
            body = {"pool_id": grove.pools[i], "session_id": f"other-{i}", "ignore_eos": True, "n_probs": 0}
            grove.proxy.ask([*grove.nodes[i].tokens, i], 80, **body)

    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(decode, i) for i in (7, 11, 19)]
        try:
            grove.proxy.until(lambda: grove.proxy.get("/polykv/capacity")["slots_busy"] == 3)
            yield
        finally:
            stop.set()
        for job in jobs:
            job.result()
    for i in (7, 11, 19):
        grove.proxy.http.delete(f"/polykv/sessions/other-{i}")


@pytest.mark.parametrize("layout", ["full", "swa", "recurrent", "hybrid", "full split", "swa split"])
def test_every_node_answers_as_an_unpatched_engine(engine_path: Path, twin_path: Path, tmp_path: Path, layout: str) -> None:
    """The whole tree: made, while others decode, after siblings went, evicted and rebuilt, and after a crash."""
    kind, *split = layout.split()
    args = ["-c", 4096, "-fa", "off", *["--no-kv-unified"] * len(split)]
    options = ("--max-pools", "24", "--pool-grace-s", "0")
    with (
        product(engine_path, tiny_model(kind), tmp_path, *options, args=[*args, "-np", 4]) as proxy,
        Engine(twin_path, tiny_model(kind), [*args, "-np", 2, "-t", 1, "--cache-ram", 0]) as clean,
    ):
        live(Grove(proxy, clean))


def live(grove: Grove) -> None:
    proxy = grove.proxy
    grove.check()
    with company(grove):
        grove.check()
    proxy.settled()
    for i in (12, 15, 18):
        grove.post(i, "evict")
    proxy.pool(tokens=tokens(200, 5))
    grove.check()
    grove.post(0, "flush")
    assert len(proxy.engine.state()["seqs"]) == 1
    grove.check()
    proxy.kill_engine()
    grove.check()
    grove.check()
    proxy.settled()
    for root in [pool["pool_id"] for pool in proxy.get("/polykv/pools")["pools"] if pool["parent"] is None]:
        assert proxy.http.delete(f"/polykv/pools/{root}?recursive=1").status_code == 200
    assert (proxy.get("/polykv/pools")["pools"], proxy.engine.state()["seqs"]) == ([], [])
