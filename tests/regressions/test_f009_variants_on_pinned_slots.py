"""F009: several completions of one prompt never block one another, are counted, and all go when their request goes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

POOL = list(range(600, 700))
LONG = {"prompt": [*POOL, 9], "n_cmpl": 3, "n_predict": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def proxy(engine_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    args = ["-c", 16384, "-np", 4, "-kvu", "--cache-ram", 0]
    with product(engine_path, tiny_model("full"), tmp_path_factory.mktemp("f009"), args=args) as running:
        running.pool(tokens=POOL, name="p")
        yield running
        assert running.http.delete("/polykv/pools/p").json()["released"] is True


@pytest.mark.parametrize("named", [False, True])
def test_fifteen_completions_arrive(proxy: Product, named: bool) -> None:
    """Five requests at once, three variants each, pinned to slots 0, 3, 2, 1 and 0: all 15 come, also in sessions."""

    def ask(n: int, slot: int) -> httpx.Response:
        body = {"prompt": [500 + n, 501, 502], "n_predict": 4, "n_cmpl": 3, "id_slot": slot}
        return proxy.http.post("/completion", json=body, headers={"x-session-id": f"s{n}"} if named else {})

    with ThreadPoolExecutor(5) as threads:
        replies = [job.result() for job in [threads.submit(ask, n, slot) for n, slot in enumerate([0, 3, 2, 1, 0])]]
    assert [reply.status_code for reply in replies] == [200] * 5
    assert sum(one["tokens_predicted"] == 4 for reply in replies for one in reply.json()) == 15
    proxy.settled()
    for n in range(5 if named else 0):
        shown = proxy.get(f"/polykv/sessions/s{n}")
        assert (shown["n_streams"], shown["n_turns"], shown["state"]) == (0, 1, "idle")
        proxy.http.delete(f"/polykv/sessions/s{n}")


@pytest.mark.parametrize(
    ("path", "field", "prompt"),
    [
        ("/completion", "n_cmpl", {"prompt": [*POOL, 1]}),
        ("/v1/completions", "n", {"prompt": [*POOL, 1]}),
        ("/v1/chat/completions", "n", {"messages": [{"role": "user", "content": "Hello."}]}),
    ],
)
def test_more_variants_than_slots_are_a_clean_400(proxy: Product, path: str, field: str, prompt: dict[str, object]) -> None:
    """Five variants on four slots: the engine's own 400, with and without a pool, and nothing stays booked."""
    for names in ({}, {"pool_id": "p"}, {"pool_id": "p", "session_id": "many"}):
        reply = proxy.http.post(path, json={**prompt, field: 5, **names})
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "<= 4" in reply.json()["error"]["message"]
    proxy.settled()
    assert proxy.http.delete("/polykv/sessions/many").status_code == 200


@pytest.mark.parametrize("how", ["client leaves", "session ends"])
def test_three_variants_are_counted_and_go_together(proxy: Product, how: str) -> None:
    """While they run: three slots, one request, the prefix once and three private parts; in the end nothing is held or running."""
    before, n_cells = proxy.get("/polykv/pools/p"), proxy.get("/polykv/capacity")["cells_used"]
    with proxy.http.stream("POST", "/completion", json={**LONG, "pool_id": "p", "session_id": "var"}) as stream:
        lines = stream.iter_lines()
        proxy.until(lambda: proxy.get("/polykv/capacity")["cells_used"] >= len(POOL) + 30)
        proxy.until(lambda: proxy.get("/polykv/pools/p")["sessions"][0]["state"] == "active")
        capacity, shown, sessions = proxy.get("/polykv/capacity"), proxy.get("/polykv/pools/p"), proxy.get("/polykv/sessions")
        assert (capacity["slots_busy"], capacity["n_requests"], capacity["seq_ids_used"]) == (3, 1, 1)
        (session,) = shown["sessions"]
        assert (session["session_id"], session["state"], shown["n_running"]) == ("var", "active", 1)
        (listed,) = [one for one in sessions["sessions"] if one["state"] != "idle"]
        assert (listed["session_id"], listed["n_slots"], listed["n_shared"]) == ("var", 3, len(POOL))
        assert session["suffix_n_tokens"] > 3 * (capacity["cells_used"] - len(POOL)) / 4, "all private parts count"
        if how == "session ends":
            assert proxy.http.delete("/polykv/sessions/var").json()["ended"] is True
            assert "error" in [*lines][-2]
    proxy.settled()
    assert all(slot["state"] == "idle" for slot in proxy.engine.state()["slots"])
    after = proxy.get("/polykv/pools/p")
    assert [after[key] - before[key] for key in ("n_queries", "n_hits", "n_tokens_shared")] == [3, 3, 300]
    assert after["n_running"] == 0
    if how == "client leaves":
        assert proxy.http.delete("/polykv/sessions/var").status_code == 200
    assert proxy.get("/polykv/sessions")["sessions"] == []
    assert proxy.get("/polykv/capacity")["cells_used"] <= n_cells
