"""The pool tree through the whole product on tiny models: what it shares, what it answers, and that every cell is somebody's."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import request_body
from tests.engine.judge import assert_equal, noise_floor
from tests.engine.tree import tokens
from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

STEPS = int(os.environ.get("POLYKV_TEST_TREE_STEPS", "120"))
ARGS = ("-c", 4096, "-np", 4)


@pytest.fixture
def plain(engine_path: Path, tmp_path: Path) -> Iterator[Product]:
    """The product on plain attention with few pool ids."""
    options = ("--max-pools", "6", "--pool-grace-s", "0")
    with product(engine_path, tiny_model("full"), tmp_path, *options, args=ARGS) as proxy:
        yield proxy


def right(proxy: Product, pool: dict[str, Any], prefix: list[int], floor: float) -> None:
    """A request on the pool shares all of it and is answered as a fresh prefill is."""
    prompt = [*prefix, 11, 12, 13]
    reply = proxy.ask(prompt, pool_id=pool["pool_id"])
    assert reply.n_shared == len(prefix)
    assert_equal(reply, proxy.engine.fresh(prompt), floor)


def sums_up(proxy: Product) -> list[dict[str, Any]]:
    """The pools, after checking that bytes add up to what the engine has in use, and that its sequences are those of pools."""
    proxy.settled()
    shown, state = proxy.get("/polykv/pools"), proxy.engine.state()
    pools = shown["pools"]
    sessions = sum(session["marginal_kv_bytes"] for pool in pools for session in pool["sessions"])
    assert sum(pool["own_kv_bytes"] for pool in pools) + sessions + shown["other_kv_bytes"] == shown["kv_bytes"]
    assert shown["kv_bytes"] == state["kv_bytes"]["used"] == proxy.get("/polykv/capacity")["kv_bytes_used"]
    assert len(state["seqs"]) == sum(pool["residency"] == "resident" for pool in pools)
    return pools


def test_a_chain_is_zero_copy_on_plain_attention(plain: Product) -> None:
    """Each fork shares exactly its branch position and adds exactly its own cells."""
    root = tokens(300, 1)
    pool = plain.pool(tokens=root)
    for at, n in ((300, 1), (257, 40), (256, 1), (33, 5)):
        before = plain.engine.used_cells()
        child = plain.fork(pool["pool_id"], tokens=[*root[:at], *tokens(n, 1000 + at)], branch_pos=at)
        assert child["n_shared"] == at
        assert plain.engine.used_cells() - before == n
    assert [pool["own_kv_bytes"] > 0 for pool in sums_up(plain)] == [True] * 5


@pytest.mark.parametrize("case", ["swa", "swa -fa on -ctk q8_0 -ctv q8_0", "recurrent", "hybrid-swa", "full --no-kv-unified"])
def test_every_byte_has_an_owner_on_every_class(engine_path: Path, tmp_path: Path, case: str) -> None:
    """Through making, forking, use, snapshot and release the bytes add up; checkpoints are counted apart, where there are any."""
    kind, *more = case.split()
    with product(engine_path, tiny_model(kind), tmp_path, "--max-pools", "6", args=(*ARGS, *more)) as proxy:
        root = proxy.pool(tokens=tokens(200, 1))
        fork = proxy.fork(root["pool_id"], tokens=[*tokens(150, 1), *tokens(90, 2)], branch_pos=150)
        assert min(root["own_kv_bytes"], fork["own_kv_bytes"]) > 0
        pools = sums_up(proxy)
        assert [pool["own_kv_bytes"] for pool in pools] == [root["own_kv_bytes"], fork["own_kv_bytes"]]
        assert (pools[0]["checkpoint_bytes"] > 0) == (proxy.engine.hello()["prefix_sharing"] == "checkpoint")
        proxy.ask([*tokens(150, 1), *tokens(90, 2), 5, 6], pool_id=fork["pool_id"], session_id="a")
        (session,) = sums_up(proxy)[1]["sessions"]
        assert session["marginal_kv_bytes"] > 0
        made = proxy.http.post("/polykv/pools", json={"from_session": "a", "name": "shot"})
        assert made.json()["own_kv_bytes"] > 0
        sums_up(proxy)
        assert proxy.http.delete(f"/polykv/pools/{root['pool_id']}?recursive=1").status_code == 409
        proxy.http.delete("/polykv/sessions/a")
        assert proxy.http.delete(f"/polykv/pools/{root['pool_id']}?recursive=1").status_code == 200
        (left,) = sums_up(proxy)
        assert left["own_kv_bytes"] == left["subtree_kv_bytes"] == proxy.get("/polykv/pools")["kv_bytes"]


def test_idle_pools_make_room_and_come_back(plain: Product) -> None:
    """Nine pools on six ids: the engine never holds more than six, each is rebuilt when used, pinned ones stay."""
    floor = noise_floor(plain.engine)
    made = []
    for n in range(9):
        made.append((plain.pool(tokens=tokens(40, 100 + n)), tokens(40, 100 + n)))
        if n == 0:
            assert plain.http.post(f"/polykv/pools/{made[0][0]['pool_id']}/pin").status_code == 200
        assert len(plain.engine.state()["seqs"]) <= 6
    assert sums_up(plain)[0]["residency"] == "resident"
    for pool, prefix in made[1:4]:
        right(plain, pool, prefix, floor)
    sums_up(plain)


def test_a_cache_full_of_kept_pools_is_saturated(engine_path: Path, tmp_path: Path) -> None:
    """A pool for which there are no cells is 429 while all the others are kept, and is made as soon as one of them is not."""
    options = ("--max-pools", "6", "--pool-grace-s", "0")
    with product(engine_path, tiny_model("full"), tmp_path, *options, args=["-c", 512, "-np", 1]) as proxy:
        first = proxy.pool(tokens=tokens(300, 1))["pool_id"]
        proxy.http.post(f"/polykv/pools/{first}/pin")
        refused = proxy.http.post("/polykv/pools", json={"tokens": tokens(300, 2)})
        assert (refused.status_code, refused.json()["error"]["code"], "retry-after" in refused.headers) == (429, "saturated", True)
        proxy.http.post(f"/polykv/pools/{first}/unpin")
        proxy.pool(tokens=tokens(300, 2))
        assert [pool["residency"] for pool in proxy.get("/polykv/pools")["pools"]] == ["evicted", "resident"]


def test_idle_pools_make_room_in_the_window_cache_too(engine_path: Path, tmp_path: Path) -> None:
    """Branches that hold a whole window each and few cells else: idle ones go when window cells run out, and none is refused."""
    options = ("--max-pools", "24", "--pool-grace-s", "0")
    with product(engine_path, tiny_model("swa"), tmp_path, *options, args=["-c", 1024, "-np", 1, "-ub", 64]) as proxy:
        root = tokens(200, 1)
        top = proxy.pool(tokens=root)["pool_id"]
        for n in range(20):
            proxy.fork(top, tokens=[*root[:128], 900 + n, 5], branch_pos=128)
        state = proxy.engine.state()
        assert state["cells"]["used"] < 400
        assert 10 < len(state["seqs"]) < 21


@pytest.mark.parametrize("kind", ["full", "swa"])
def test_idle_pools_never_cost_a_request(engine_path: Path, tmp_path: Path, kind: str) -> None:
    """With all cells in idle pools a plain request and one on a pool are served: pools leave, those in use and pinned stay."""
    options = ("--max-pools", "24", "--pool-grace-s", "0")
    with product(engine_path, tiny_model(kind), tmp_path, *options, args=["-c", 1024, "-np", 1, "-ub", 64]) as proxy:
        kept, used = tokens(100, 1), tokens(100, 2)
        for name, prefix in (("kept", kept), ("used", used)):
            proxy.pool(tokens=prefix, name=name)
        proxy.http.post("/polykv/pools/kept/pin")
        for n in range(7 if kind == "full" else 14):
            proxy.fork("used", tokens=[*used, *tokens(100, 50 + n)])
        proxy.until(lambda: proxy.get("/polykv/pools")["pools"][-1]["kept_by"] is None)
        proxy.until(lambda: proxy.http.post("/completion", json=request_body(tokens(500, 9), 4)).status_code == 200)
        assert proxy.ask([*used, *tokens(400, 10)], pool_id="used").n_shared == 100
        proxy.settled()
        residency = {pool["name"]: pool["residency"] for pool in proxy.get("/polykv/pools")["pools"]}
        assert (residency["kept"], residency["used"]) == ("resident", "resident")
        assert sums_up(proxy) if kind == "full" else True


def test_compaction_frees_cells_and_answers_right(plain: Product) -> None:
    """The compacted pool shares what it keeps with the old one, outlives it, and answers as a fresh prefill does."""
    floor = noise_floor(plain.engine)
    system = tokens(64, 1)
    work = plain.pool(tokens=[*system, *tokens(500, 2)])
    for session in "ab":
        plain.ask([*system, *tokens(500, 2), 5], pool_id=work["pool_id"], session_id=session)
    plain.settled()
    before = plain.engine.used_cells()
    short = [*system, *tokens(30, 3)]
    reply = plain.http.post(f"/polykv/pools/{work['pool_id']}/compact", json={"tokens": short, "migrate": ["a", "b"]})
    assert reply.status_code == 201, reply.text
    assert (reply.json()["n_shared"], reply.json()["compacted"]["released"]) == (64, [work["pool_id"]])
    right(plain, reply.json(), short, floor)
    for session in "ab":
        assert plain.ask([*short, 6], pool_id=reply.json()["pool_id"], session_id=session).n_shared == len(short)
    sums_up(plain)
    assert plain.engine.used_cells() < before / 2


@pytest.mark.timeout(300 + 3 * STEPS)
def test_random_lives_add_up_on_the_real_engine(plain: Product) -> None:
    """After each of many random verbs cells and sequence ids agree; every fiftieth request is compared with a fresh prefill."""
    floor = noise_floor(plain.engine)
    dice = random.Random(11)
    for step in range(STEPS):
        pools = sums_up(plain)
        pool = dice.choice(pools) if pools else None
        tail = [dice.randrange(300, 40000) for _ in range(dice.randrange(1, 9))]
        session = {"session_id": dice.choice("abc")} if dice.random() < 0.7 else {}
        kind = dice.choice(
            ["create", "fork", "fork", "ask", "ask", "snap", "evict", "flush", "end", "release", "plain", "pin", "unpin"]
        )
        if pool is None or kind == "create":
            plain.http.post("/polykv/pools", json={"tokens": [*tokens(dice.randrange(5, 60), 1), *tail]})
            continue
        url = f"/polykv/pools/{pool['pool_id']}"
        prefix = plain.get(f"{url}/tokens")["tokens"]
        if kind == "fork":
            plain.http.post(f"{url}/fork", json={"tokens": [*prefix[: dice.randrange(1, len(prefix) + 1)], *tail]})
        elif kind == "ask":
            reply = plain.ask([*prefix, *tail], pool_id=pool["pool_id"], **session)
            if step % 5 == 0:
                assert_equal(reply, plain.engine.fresh([*prefix, *tail]), floor)
        elif kind == "plain":
            plain.ask(tail, 2)
        elif kind == "snap" and session:
            plain.http.post(f"{url}/fork", json={"from_session": session["session_id"]})
        elif kind == "end" and session:
            plain.http.delete(f"/polykv/sessions/{session['session_id']}")
        elif kind == "release":
            plain.http.delete(url + dice.choice(["", "?recursive=1"]))
        elif kind in {"evict", "flush", "pin", "unpin"}:
            plain.http.post(f"{url}/{kind}")
    for listed in plain.get("/polykv/sessions")["sessions"]:
        if listed["session_id"]:
            plain.http.delete(f"/polykv/sessions/{listed['session_id']}")
    for pool in sums_up(plain):
        plain.http.post(f"/polykv/pools/{pool['pool_id']}/unpin")
    for pool in [pool for pool in sums_up(plain) if pool["parent"] is None]:
        assert plain.http.delete(f"/polykv/pools/{pool['pool_id']}?recursive=1").status_code == 200
    assert (sums_up(plain), plain.engine.state()["seqs"]) == ([], [])
