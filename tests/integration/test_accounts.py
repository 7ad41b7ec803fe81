"""Whose bytes are whose, and how news is told, over the fake engine, whose cells are counted by identity."""

import random
from pathlib import Path

import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, rig

BASE = list(range(100, 140))
BYTES_PER_TOKEN = 100


async def sums_up(proxy: Rig) -> dict:
    """The listing, after checking that its parts are the engine's cells."""
    shown = (await proxy.api.get("/polykv/pools")).json()
    own = sum(pool["own_kv_bytes"] for pool in shown["pools"])
    sessions = sum(session["marginal_kv_bytes"] for pool in shown["pools"] for session in pool["sessions"])
    assert own + sessions + shown["other_kv_bytes"] == shown["kv_bytes"] == proxy.engine.used_cells() * BYTES_PER_TOKEN
    roots = sum(pool["subtree_kv_bytes"] for pool in shown["pools"] if pool["parent"] is None)
    assert roots == own + sessions
    return shown


async def test_every_byte_is_somebody_s_once(tmp_path: Path) -> None:
    """Pools own their own range, sessions what they alone hold; the sum is what the engine has in use, also after an evict."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE, name="root")
        await proxy.api.post("/polykv/pools/root/fork", json={"tokens": [*BASE[:30], 5, 6], "name": "kid"})
        await proxy.call("/completion", {"prompt": [*BASE[:30], 5, 6, 1, 2], "pool_id": "kid", "session_id": "a", "n_predict": 3})
        await proxy.call("/completion", {"prompt": [9, 9, 9], "n_predict": 2})
        await proxy.settle()
        root, kid = (await sums_up(proxy))["pools"]
        assert (root["own_kv_bytes"], kid["own_kv_bytes"]) == (4000, 200)
        assert (kid["subtree_kv_bytes"], root["subtree_kv_bytes"]) == (700, 4700)
        assert [s["marginal_kv_bytes"] for s in kid["sessions"]] == [500]
        await proxy.api.post("/polykv/pools/root/fork", json={"from_session": "a", "name": "snap"})
        shown = (await sums_up(proxy))["pools"]
        assert [pool["own_kv_bytes"] for pool in shown] == [4000, 200, 500]
        assert [s["marginal_kv_bytes"] for s in shown[1]["sessions"]] == [0]


@pytest.mark.parametrize("unified", [True, False])
async def test_random_lives_add_up(tmp_path: Path, unified: bool) -> None:
    """After each of many random creates, forks, requests, snapshots, evictions and releases the sum is exact."""
    dice = random.Random(7)
    async with rig(tmp_path, FakeEngine(max_pools=6, n_slots=3, unified=unified)) as proxy:
        for _ in range(120):
            pools = list(proxy.runtime.hub.ledger.tree)
            pool = dice.choice(pools) if pools else None
            kind = dice.choice(["create", "fork", "fork", "ask", "ask", "ask", "snap", "evict", "flush", "end", "release", "plain"])
            tail = [dice.randrange(20, 90) for _ in range(dice.randrange(1, 6))]
            url = f"/polykv/pools/{pool.pool_id}" if pool else ""
            session = dice.choice("abc")
            if kind == "create":
                await proxy.api.post("/polykv/pools", json={"tokens": BASE[: dice.randrange(5, 40)] + tail})
            elif kind == "plain":
                await proxy.call("/completion", {"prompt": tail, "n_predict": 1})
            elif kind == "end":
                await proxy.api.delete(f"/polykv/sessions/{session}")
            elif kind == "snap":
                await proxy.api.post("/polykv/pools", json={"from_session": session})
            elif pool is not None and kind == "fork":
                keep = dice.randrange(1, pool.prefix_len + 1)
                await proxy.api.post(f"{url}/fork", json={"tokens": [*pool.tokens[:keep].tolist(), *tail, 95]})
            elif pool is not None and kind == "ask":
                named = {"session_id": session} if dice.random() < 0.7 else {}
                await proxy.call(
                    "/completion", {"prompt": pool.tokens.tolist() + tail, "pool_id": pool.pool_id, "n_predict": 2, **named}
                )
            elif pool is not None and kind in {"evict", "flush"}:
                await proxy.api.post(f"{url}/{kind}")
            elif pool is not None and kind == "release":
                await proxy.api.delete(url + dice.choice(["", "?recursive=1"]))
            await proxy.settle()
            await sums_up(proxy)


async def test_news_has_a_greater_number(tmp_path: Path) -> None:
    """`seq` stays while nothing happens and grows with anything new; a caller with the tag gets 304."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        first = await proxy.api.get("/polykv/pools")
        again = await proxy.api.get("/polykv/pools", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        await proxy.api.post("/polykv/pools/1/pin")
        news = await proxy.api.get("/polykv/pools", headers={"if-none-match": first.headers["etag"]})
        assert news.status_code == 200
        assert news.json()["seq"] > first.json()["seq"]


async def test_a_tree_is_shown_in_order_and_to_any_depth(tmp_path: Path) -> None:
    """The list is by id; a pool comes with all below it, parents first; `depth` cuts both."""
    async with rig(tmp_path, FakeEngine(max_pools=5)) as proxy:
        await proxy.pool(tokens=BASE)
        for parent, tokens in ((1, [*BASE, 5]), (1, [*BASE, 6]), (2, [*BASE, 5, 7])):
            await proxy.api.post(f"/polykv/pools/{parent}/fork", json={"tokens": tokens})

        async def ids(path: str, key: str) -> list[int]:
            return [pool["pool_id"] for pool in (await proxy.api.get(path)).json()[key]]

        assert await ids("/polykv/pools", "pools") == [1, 2, 3, 4]
        assert await ids("/polykv/pools?depth=2", "pools") == [1, 2, 3]
        assert await ids("/polykv/pools/1", "subtree") == [2, 4, 3]
        assert await ids("/polykv/pools/1?depth=1", "subtree") == [2, 3]
        assert await ids("/polykv/pools/2?depth=0", "subtree") == []
        for bad in ("x", "-1", "0", "1.5", ""):
            assert (await proxy.api.get(f"/polykv/pools?depth={bad}")).json()["error"]["param"] == "depth"
        assert "from 1 to 999999999" in (await proxy.api.get(f"/polykv/pools?depth={10**9}")).json()["error"]["message"]
