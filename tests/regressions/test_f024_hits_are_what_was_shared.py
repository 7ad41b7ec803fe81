"""F024: hit counts are the engine's own, a rebuilt pool is no hit, a zero says why, and nothing ever counts down."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tree import tokens
from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

POOL = tokens(100, 1)


class Counting:
    """Asks on the pool, each time from an empty slot, and holds the counts against those before."""

    def __init__(self, proxy: Product) -> None:
        self.proxy, self.n_cached = proxy, 0
        self.before = self.counts()

    def counts(self) -> dict[str, int]:
        self.proxy.settled()
        shown = self.proxy.get("/polykv/pools/p")
        return {name: shown[name] for name in ("n_queries", "n_hits", "n_tokens_shared", "n_rebuilds")}

    def ask(self, prompt: list[int], pool: str | None = "p") -> tuple[dict[str, int], dict[str, Any]]:
        """What was added to each count, and what the reply says; its numbers are those of the engine."""
        named = {"pool_id": pool} if pool else {}
        reply = self.proxy.http.post("/completion", json={"prompt": prompt, "n_predict": 1, "session_id": "s", **named})
        said, now = reply.json(), self.counts()
        self.proxy.http.delete("/polykv/sessions/s")
        added = {name: value - self.before[name] for name, value in now.items()}
        assert min(added.values()) >= 0
        assert now["n_hits"] + now["n_rebuilds"] <= now["n_queries"]
        assert (
            said["opencoti"]["cached_prefix_tokens"]
            == said["timings"]["cache_n"]
            == int(reply.headers.get("x-cached-prefix-tokens", "0"))
        )
        assert said["timings"]["cache_n"] + said["timings"]["prompt_n"] == len(prompt)
        self.before = now
        self.n_cached += said["timings"]["cache_n"]
        return added, said["opencoti"]


def counted(n_hits: int, n_shared: int, n_rebuilds: int = 0) -> dict[str, int]:
    return {"n_queries": 1, "n_hits": n_hits, "n_tokens_shared": n_shared, "n_rebuilds": n_rebuilds}


@pytest.mark.parametrize("kind", ["full", "swa"])
def test_counts_are_the_engines(engine_path: Path, tmp_path: Path, kind: str) -> None:
    """20 random prompts, one prompt twice, after an eviction, three tokens in common, and no pool at all."""
    with product(engine_path, tiny_model(kind), tmp_path, args=["-c", 2048, "-np", 2]) as proxy:
        proxy.pool(tokens=POOL, name="p")
        asks = Counting(proxy)
        for n in range(20):
            added, said = asks.ask(tokens(50, 100 + n))
            assert (added, said["miss"]) == (counted(0, 0), "token_mismatch")
        for _ in range(2):
            added, said = asks.ask([*POOL, 5])
            assert (added, said["miss"]) == (counted(1, len(POOL)), None)
        assert proxy.http.post("/polykv/pools/p/evict").json()["evicted"] is True
        added, said = asks.ask([*POOL, 5])
        assert (added, said["rebuilt"], said["miss"]) == (counted(0, 0, 1), True, None)
        added, said = asks.ask([*POOL[:3], 5, 6, 7])
        assert (added, said["miss"]) == ((counted(1, 3), None) if kind == "full" else (counted(0, 0), "memory_class"))
        added, said = asks.ask([*POOL, 5], pool=None)
        assert (set(added.values()), said["miss"], "pool_id" in said) == ({0}, None, False)
        reasons = {"token_mismatch": 20, "rebuilt": 1, "no_pool": 1} | ({"memory_class": 1} if kind == "swa" else {})
        proxy.until(lambda: not_shared(proxy) == reasons)
        hits = re.search(r"^vllm:prefix_cache_hits_total\S* (\S+)$", proxy.http.get("/metrics").text, re.MULTILINE)
        assert hits
        assert float(hits[1]) == asks.n_cached


def not_shared(proxy: Product) -> dict[str, int]:
    """Turns that a pool saved nothing, by reason."""
    found = re.findall(r'^polykv_not_shared_total\{reason="(\w+)"\} ([0-9.]+)$', proxy.http.get("/metrics").text, re.MULTILINE)
    return {reason: int(float(n)) for reason, n in found if float(n)}
