"""F007: an attach finds its prefix on a slot that was never used, and hits are what the engine says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

POOL = list(range(600, 700))


def launched(proxy: Product) -> list[int]:
    """How many requests each slot has had."""
    return [slot["totals"]["n_launched"] for slot in proxy.engine.state()["slots"]]


def ask(proxy: Product, prompt: list[int], **more: object) -> tuple[int, int]:
    """Tokens not computed, and tokens taken from the pool (-1: no pool was named)."""
    reply = proxy.http.post("/completion", json={"prompt": prompt, "n_predict": 1, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()["timings"]["cache_n"], int(reply.headers.get("x-cached-prefix-tokens", -1))


def test_the_whole_pool_is_shared_on_a_slot_without_history(engine_path: Path, tmp_path: Path) -> None:
    """Where stock, pinned to an unused slot, computes a known prefix again, an attach to an unused slot shares the whole pool."""
    with product(engine_path, tiny_model("full"), tmp_path, args=["-c", 2048, "-np", 2, "-kvu"]) as proxy:
        proxy.pool(tokens=POOL, name="p")
        assert sorted(launched(proxy)) == [0, 1], "making the pool borrowed one slot"
        before = launched(proxy)
        assert ask(proxy, [*POOL, 11], pool_id="p", session_id="a") == (100, 100)
        assert ask(proxy, [*POOL, 13], pool_id="p", session_id="c") == (100, 100)
        proxy.settled()
        first = proxy.get("/polykv/sessions/a")["slot"]
        second = proxy.get("/polykv/sessions/c")["slot"]
        assert {first, second} == {0, 1}
        assert 0 in (before[first], before[second])
        assert ask(proxy, POOL, pool_id="p")[0] == 99, "one token of a prompt is always computed"


def test_a_recomputed_prefix_is_counted_as_a_miss(engine_path: Path, tmp_path: Path) -> None:
    """Requests that named the pool and shared nothing raise the number of queries and not that of hits, whatever was asked for."""
    with product(engine_path, tiny_model("full"), tmp_path, args=["-c", 2048, "-np", 2, "-kvu"]) as proxy:
        proxy.pool(tokens=POOL, name="p")
        assert ask(proxy, [*POOL, 1], pool_id="p", session_id="a") == (100, 100)
        assert ask(proxy, [*POOL, 1], pool_id="p", cache_prompt=False) == (0, 0)
        assert ask(proxy, [5, *POOL], pool_id="p") == (0, 0)
        assert ask(proxy, [*POOL[:40], 7, 8], pool_id="p")[1] == 40
        proxy.settled()
        shown = proxy.get("/polykv/pools/p")
        assert [shown[key] for key in ("n_queries", "n_hits", "n_tokens_shared")] == [4, 2, 140]
