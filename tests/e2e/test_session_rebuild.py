"""`rebuild` on the real engine: a session whose slot another took, or whose engine died, becomes a pool of its last prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.product import product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
TURN = {"messages": [{"role": "system", "content": "You keep the books."}, {"role": "user", "content": "Which ships came?"}]}


def test_a_lost_session_is_computed_from_its_last_turn(engine_path: Path, tmp_path: Path) -> None:
    """The pool holds exactly the ids of that prompt, and the next turn of the conversation shares all of it."""
    with product(engine_path, tiny_model("full"), tmp_path, args=("-c", 4096, "-np", 1, "--jinja")) as proxy:
        first = proxy.http.post(CHAT, json={**TURN, "session_id": "main", "max_tokens": 4}).json()
        said = first["choices"][0]["message"]["content"]
        proxy.http.post("/completion", json={"prompt": "Something else entirely.", "session_id": "other", "n_predict": 1})
        proxy.settled()
        order = {"from_session": "main", "name": "main"}
        refused = proxy.http.post("/polykv/pools", json=order)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_not_resident")
        pool = proxy.pool(**order, rebuild=True)
        assert pool["source"] == "last_turn"
        assert proxy.pool_tokens() == proxy.prompt_ids(CHAT, TURN)
        following = [*TURN["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "And today?"}]
        reply = proxy.http.post(CHAT, json={"messages": following, "pool_id": "main", "session_id": "main", "max_tokens": 1})
        assert reply.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])
        proxy.settled()

        proxy.kill_engine()
        child = proxy.http.post("/polykv/pools/main/fork", json={"from_session": "main", "rebuild": True}).raise_for_status().json()
        assert (child["branch_pos"], child["n_shared"]) == (pool["prefix_len"], pool["prefix_len"])
        assert child["prefix_len"] > pool["prefix_len"]
