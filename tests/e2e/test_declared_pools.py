"""`--pools` on the real engine: there when the proxy is ready, there again after a crash, kept and replaced over a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

SYSTEM = [{"role": "system", "content": "You keep the harbour's books."}]
TASK = [*SYSTEM, {"role": "user", "content": "Read the list of ships."}]
ARGS = ("-c", 4096, "-np", 2, "--jinja")


def pools(proxy: Product) -> dict[str, dict]:
    return {pool["name"]: pool for pool in proxy.get("/polykv/pools")["pools"]}


def hits(proxy: Product, name: str) -> int:
    """How much a chat that goes on from the task shares."""
    body = {"messages": [*TASK, {"role": "assistant", "content": "Done."}], "max_tokens": 1, "pool_id": name}
    return int(proxy.http.post("/v1/chat/completions", json=body).raise_for_status().headers["x-cached-prefix-tokens"])


def test_declared_pools_live_as_long_as_the_file_says(engine_path: Path, tmp_path: Path) -> None:
    """Made in order, remade by nobody's request after a crash, and over a restart kept, replaced, or left alone."""
    (tmp_path / "task.json").write_text(json.dumps(TASK))
    (tmp_path / "note.txt").write_text("A note that everybody reads first.\n")
    file = tmp_path / "pools.yaml"
    file.write_text(
        "pools:\n  task: {parent: sys, messages_file: task.json}\n"
        f"  sys: {{messages: {json.dumps(SYSTEM)}, pin: {{owner: file}}}}\n  note: {{prompt_file: note.txt}}\n"
        "  huge: {tokens_file: huge.json}\n"
    )
    (tmp_path / "huge.json").write_text(json.dumps([300] * 5000))
    options = ("--pools", str(file))
    with product(engine_path, tiny_model("full"), tmp_path, *options, args=ARGS) as proxy:
        assert "declared: 3 of 4 are there" in proxy.served.said
        assert "declared pool huge could not be made: the prefix has 5000 tokens" in proxy.served.said
        first = pools(proxy)
        assert {name: pool["residency"] for name, pool in first.items()} == dict.fromkeys(("sys", "task", "note"), "resident")
        assert (first["task"]["parent"], first["sys"]["pin_owner"]) == (first["sys"]["pool_id"], "file")
        assert first["task"]["n_shared"] == first["task"]["branch_pos"] > 5
        assert hits(proxy, "task") == first["task"]["prefix_len"]
        proxy.kill_engine()
        proxy.until(lambda: all(pool["residency"] == "resident" for pool in pools(proxy).values()))
        again = pools(proxy)
        assert [(p["pool_id"], p["n_rebuilds"]) for p in again.values()] == [(p["pool_id"], 0) for p in first.values()]

    (tmp_path / "note.txt").write_text("Another note that everybody reads first.\n")
    file.write_text(file.read_text().replace("  huge: {tokens_file: huge.json}\n", "").replace("  task:", "  job:"))
    with product(engine_path, tiny_model("full"), tmp_path, *options, args=ARGS) as proxy:
        found = {one["name"]: (one["outcome"], one["pool_id"]) for one in proxy.get("/polykv/health")["declared"]["pools"]}
        assert found["sys"] == ("kept", first["sys"]["pool_id"])
        assert found["job"][0] == "made"
        assert found["note"][0] == "replaced"
        assert found["note"][1] > first["note"]["pool_id"]
        assert pools(proxy)["task"]["pool_id"] == first["task"]["pool_id"]
        proxy.until(lambda: None not in pools(proxy))
        assert hits(proxy, "job") == first["task"]["prefix_len"]
