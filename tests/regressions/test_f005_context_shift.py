"""F005: context shift switched on by the user never touches cells that several share; the start says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.driver import Reply, request_body
from tests.engine.judge import assert_equal, noise_floor
from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

POOL = list(range(600, 700))
ASK_B = [*POOL, 21, 22, 23]


def answer(proxy: Product, session: str, pool: str = "p", n_shared: int = len(POOL)) -> Reply:
    reply = proxy.http.post("/completion", json=request_body(ASK_B, 8, pool_id=pool, session_id=session))
    assert reply.headers["x-cached-prefix-tokens"] == str(n_shared)
    return Reply(reply.status_code, reply.json(), dict(reply.headers))


def test_attached_sessions_stop_at_the_limit_and_plain_ones_shift(engine_path: Path, tmp_path: Path) -> None:
    """A ends with finish reason `length`, no shift is logged, answers on the pool stay as they were; a plain request shifts."""
    log = tmp_path / "engine.log"
    args = ["-c", 768, "-np", 2, "--kv-unified-per-slot", 256, "--context-shift", "--cache-ram", 0]
    with product(engine_path, tiny_model("full"), tmp_path, "--engine-log", str(log), args=args) as proxy:
        assert "note   context shift is on: slots that hold shared cells are never shifted" in proxy.served.said
        made = proxy.pool(tokens=POOL, name="p")
        floor = noise_floor(proxy.engine)
        before = answer(proxy, "b")
        long = {"prompt": [*POOL, 11, 12], "max_tokens": -1, "ignore_eos": True, "pool_id": "p", "session_id": "a"}
        a = proxy.http.post("/v1/completions", json=long).json()
        assert a["choices"][0]["finish_reason"] == "length"
        assert a["usage"]["total_tokens"] in range(250, 258)
        assert "slot context shift" not in log.read_text(errors="replace")
        proxy.http.delete("/polykv/sessions/a")
        for session in ("b", "newcomer"):
            assert_equal(answer(proxy, session), before, floor)
        assert proxy.pool_tokens() == POOL
        forked = proxy.http.post("/polykv/pools/p/fork", json={"tokens": ASK_B[:-1], "name": "f"})
        assert (forked.status_code, forked.json()["branch_pos"]) == (201, len(POOL))
        assert_equal(answer(proxy, "on the fork", "f", len(POOL) + 2), before, floor)
        shown = proxy.get("/polykv/pools/p")
        assert [shown[key] for key in ("prefix_len", "prefix_hash", "residency")] == [100, made["prefix_hash"], "resident"]
        for session in ("b", "newcomer", "on the fork"):
            proxy.http.delete(f"/polykv/sessions/{session}")
        plain = proxy.http.post("/completion", json=request_body(POOL[::-1], 300, ignore_eos=True, n_probs=0)).json()
        assert (plain["tokens_predicted"], plain["truncated"]) == (300, True)
        assert "slot context shift" in log.read_text(errors="replace")
