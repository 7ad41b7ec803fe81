"""F003: unified cache and chunk reuse together: every request ends, nothing stays held, and the start warns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.fakes.product import product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

COMMON = list(range(600, 640))
"""40 of the 100 tokens of each prompt."""


def alike(n: int) -> list[int]:
    """A prompt that begins as the others do; then a part of its own and one that all have, in either order."""
    own, shared = [1000 + 97 * n + i for i in range(30)], list(range(700, 730))
    return [*COMMON, *shared, *own] if n % 2 else [*COMMON, *own, *shared]


def test_similar_requests_all_end(engine_path: Path, tmp_path: Path) -> None:
    """Five in a row and three at once, plain, in sessions and on a pool: all are answered, nothing stays held."""
    args = ["-c", 2048, "-np", 3, "-kvu", "--cache-reuse", 8]
    with product(engine_path, tiny_model("full"), tmp_path, args=args) as proxy:
        assert "note   chunk reuse is on" in proxy.served.said

        def ask(n: int, **names: str) -> httpx.Response:
            return proxy.http.post("/completion", json={"prompt": alike(n), "n_predict": 4, **names})

        proxy.pool(tokens=COMMON, name="p")
        moved = 0
        for n in range(5):
            for names in ({}, {"session_id": f"s{n % 2}"}, {"session_id": f"p{n % 2}", "pool_id": "p"}):
                reply = ask(n, **names).json()
                assert reply["tokens_predicted"] == 4
                moved += reply["timings"]["cache_n"] == len(COMMON) + 30
        assert moved, "no chunk was reused"
        for names in ({}, {"pool_id": "p"}):
            with ThreadPoolExecutor(3) as threads:
                replies = list(threads.map(lambda n, names=names: ask(n, **names), range(5, 8)))  # type: ignore[misc]
            assert [(reply.status_code, reply.json()["tokens_predicted"]) for reply in replies] == [(200, 4)] * 3
        proxy.settled()
        assert proxy.pool_tokens() == COMMON
        assert proxy.http.delete("/polykv/pools/p").json()["released"] is True
