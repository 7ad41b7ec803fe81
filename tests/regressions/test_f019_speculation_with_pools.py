"""F019: a draft model beside pools gives the same text, goes on drafting, and keeps nothing of what was released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

N_CELLS = 512
"""Cells of the target's cache, and of the draft's."""
N_ROUNDS = 7


def ask(proxy: Product, prompt: list[int], session: str) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 6, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    reply = proxy.http.post("/completion", json={**body, "pool_id": "p", "session_id": session})
    assert int(reply.headers["x-cached-prefix-tokens"]) >= 100, reply.text
    return reply.json()


def replay(proxy: Product) -> tuple[list[list[int]], list[int]]:
    """Rounds of four sessions; each round on a pool of its own, which is released. Ids, and accepted drafts a round.

    In all, pools and sessions need several times the cells that there are.
    """
    ids, accepted = [], []
    for n in range(N_ROUNDS):
        pool = [400 + n, *range(600, 710)]
        proxy.pool(tokens=pool, name="p")
        replies = [ask(proxy, [*pool, 100 + i], f"s{i}") for i in range(4)]
        replies += [ask(proxy, [*pool, 100 + i, *replies[i]["tokens"], 9], f"s{i}") for i in range(4)]
        ids += [reply["tokens"] for reply in replies]
        accepted.append(sum(reply["timings"].get("draft_n_accepted", 0) for reply in replies))
        for i in range(4):
            assert proxy.http.delete(f"/polykv/sessions/s{i}").json()["ended"] is True
        assert proxy.http.delete("/polykv/pools/p").json()["released"] is True
    proxy.settled()
    assert proxy.get("/polykv/capacity")["cells_used"] == 0
    return ids, accepted


def test_the_same_ids_and_drafts_to_the_last_round(engine_path: Path, tmp_path: Path) -> None:
    """With and without a draft model the ids are equal; drafts are accepted in each round, although much was released before."""
    args = ["-c", N_CELLS, "-np", 4, "-kvu", "--cache-ram", 0]
    draft = ["--spec-type", "draft-simple", "--spec-draft-model", tiny_model("draft"), "--spec-draft-n-max", 4]
    model = tiny_model("full-f32")
    with product(engine_path, model, tmp_path / "off", args=args) as proxy:
        assert proxy.get("/polykv/health")["pools"]["engine"]["speculative"] is False
        plain, nothing = replay(proxy)
        assert sum(nothing) == 0
    with product(engine_path, model, tmp_path / "on", args=[*args, *draft]) as proxy:
        assert proxy.get("/polykv/health")["pools"]["engine"]["speculative"] is True
        ids, accepted = replay(proxy)
    assert ids == plain
    assert all(accepted), accepted
