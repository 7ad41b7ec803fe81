"""`POST /polykv/pools/{id}/compact`: a shorter prefix in the place of a long one, and what becomes of a failure half way."""

import asyncio
from pathlib import Path

import pytest

from polykv_proxy.errors import JournalError
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import Rig, rig

SYS = list(range(100, 130))
LONG = [*SYS, *range(200, 260)]
SHORT = [*SYS, 300, 301, 302]


async def world(proxy: Rig) -> None:
    """1 is the system prompt, 2 the long context on it, 3 a branch of that; sessions a and b on 2, c on 3."""
    await proxy.pool(tokens=SYS, name="sys")
    await proxy.api.post("/polykv/pools/sys/fork", json={"tokens": LONG, "name": "work"})
    await proxy.api.post("/polykv/pools/work/fork", json={"tokens": [*LONG, 5]})
    for session, pool, prompt in (("a", 2, LONG), ("b", 2, LONG), ("c", 3, [*LONG, 5])):
        await proxy.call("/completion", {"prompt": [*prompt, 1], "pool_id": pool, "session_id": session, "n_predict": 1})
    await proxy.settle()


async def compact(proxy: Rig, pool: object = "work", **body: object) -> tuple[int, dict]:
    reply = await proxy.api.post(f"/polykv/pools/{pool}/compact", json=body)
    return reply.status_code, reply.json()


async def pools(proxy: Rig) -> list[int]:
    return [pool["pool_id"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]]


async def swept(proxy: Rig) -> None:
    for _ in range(4):
        await proxy.runtime.sweep()
        await proxy.settle()


async def test_a_compacted_context_takes_the_old_one_s_place(tmp_path: Path) -> None:
    """The new pool shares what it keeps, the sessions are attached to it, the old subtree is gone, and fewer cells are in use."""
    async with rig(tmp_path, FakeEngine(max_pools=5)) as proxy:
        await world(proxy)
        computed = proxy.engine.computed
        status, new = await compact(proxy, tokens=SHORT, name="work2", migrate=["a", "b", "c"])
        assert (status, new["parent"], new["branch_pos"], new["n_shared"]) == (201, 1, 30, 30)
        assert proxy.engine.computed - computed == 3
        assert new["compacted"] == {"from": 2, "migrated": ["a", "b", "c"], "released": [3, 2], "retiring": []}
        assert [session["session_id"] for session in (await proxy.api.get("/polykv/pools/work2")).json()["sessions"]] == [
            "a",
            "b",
            "c",
        ]
        assert await pools(proxy) == [1, 4]
        for session in "abc":
            ask = {"prompt": [*SHORT, 7], "pool_id": "work2", "session_id": session, "n_predict": 1}
            reply = await proxy.call("/completion", ask)
            assert reply.headers["x-cached-prefix-tokens"] == "33"
        await proxy.settle()
        assert proxy.engine.used_cells() == 33 + 3 * 2


async def test_what_is_still_used_goes_with_its_last_user(tmp_path: Path) -> None:
    """Sessions that do not move, pins and running requests keep their pool; it goes when they do, leaf first."""
    async with rig(tmp_path, FakeEngine(max_pools=5)) as proxy:
        await world(proxy)
        await proxy.api.post("/polykv/pools/work/pin")
        _, new = await compact(proxy, tokens=SHORT, migrate=["a", "b"])
        assert (new["compacted"]["released"], new["compacted"]["retiring"]) == ([], [2, 3])
        await swept(proxy)
        assert await pools(proxy) == [1, 2, 3, 4]
        await proxy.api.delete("/polykv/sessions/c")
        await swept(proxy)
        assert await pools(proxy) == [1, 2, 4]
        assert (await proxy.api.get("/polykv/pools/work")).json()["orphaned_pin"] is True
        await proxy.api.post("/polykv/pools/work/unpin")
        await swept(proxy)
        assert await pools(proxy) == [1, 4]


async def test_a_root_is_compacted_onto_its_own_beginning(tmp_path: Path) -> None:
    """Without a parent the new pool is a root that shares the kept cells and owns them when the old pool is gone."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=LONG)
        status, new = await compact(proxy, 1, tokens=SHORT, keep_to=20)
        assert (status, new["parent"], new["branch_pos"], new["n_shared"]) == (201, None, 0, 20)
        shown = (await proxy.api.get("/polykv/pools")).json()
        assert [pool["own_kv_bytes"] for pool in shown["pools"]] == [3300]
        assert proxy.engine.used_cells() == 33
        await proxy.engine.sleep_and_wake()
        await proxy.until_linked(proxy.engine.boot_id)
        reply = await proxy.call("/completion", {"prompt": [*SHORT, 7], "pool_id": 2, "n_predict": 1})
        assert reply.headers["x-cached-prefix-tokens"] == "33"


async def test_an_old_pool_without_kv_is_compacted_all_the_same(tmp_path: Path) -> None:
    """What is not resident is not brought back for this: the new pool builds on its parent."""
    async with rig(tmp_path, FakeEngine(max_pools=5)) as proxy:
        await proxy.pool(tokens=SYS)
        await proxy.api.post("/polykv/pools/1/fork", json={"tokens": LONG})
        await proxy.api.post("/polykv/pools/2/evict")
        computed = proxy.engine.computed
        status, new = await compact(proxy, 2, tokens=SHORT)
        assert (status, new["n_shared"], proxy.engine.computed - computed) == (201, 30, 3)
        assert await pools(proxy) == [1, 3]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"tokens": SHORT, "keep_to": 31}, 409, "prefix_mismatch"),
        ({"tokens": [7, 8]}, 400, "invalid_request"),
        ({"tokens": LONG}, 400, "invalid_request"),
        ({"tokens": SHORT, "migrate": ["nobody"]}, 404, "session_not_found"),
        ({"tokens": SHORT, "migrate": ["a", "a"]}, 400, "invalid_request"),
        ({"tokens": SHORT, "migrate": ["free"]}, 409, "conflict"),
        ({"from_session": "a"}, 400, "invalid_request"),
        ({"tokens": SHORT, "name": "work"}, 409, "name_taken"),
        ({"tokens": SHORT, "keep_to": 0}, 400, "invalid_request"),
    ],
)
async def test_what_is_refused_changes_nothing(tmp_path: Path, body: dict, status: int, code: str) -> None:
    """Pools, sessions and cells are as before."""
    async with rig(tmp_path, FakeEngine(max_pools=5)) as proxy:
        await world(proxy)
        await proxy.call("/completion", {"prompt": [9, 9], "session_id": "free", "n_predict": 1})
        await proxy.settle()
        before = ((await proxy.api.get("/polykv/pools")).json(), proxy.engine.used_cells())
        got, reply = await compact(proxy, **body)
        assert (got, reply["error"]["code"]) == (status, code)
        assert ((await proxy.api.get("/polykv/pools")).json(), proxy.engine.used_cells()) == before


async def test_nothing_is_lost_when_a_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed prefill changes nothing; a journal that cannot take the old pools' end leaves them, with the new one there."""
    async with rig(tmp_path, FakeEngine(max_pools=5)) as proxy:
        await world(proxy)
        before = (await proxy.api.get("/polykv/pools")).json()
        for _ in "ab":
            proxy.engine.fail_next("prefill", EngineFaultError(500, "server_error", "no"))
        assert (await compact(proxy, tokens=SHORT, migrate=["a"]))[0] == 502
        assert (await proxy.api.get("/polykv/pools")).json() == before
        proxy.engine.faults.clear()

        async def full(*_args: object) -> None:
            raise JournalError("full")

        with monkeypatch.context() as broken:
            broken.setattr(proxy.runtime.hub.journal, "save_terms", full)
            status, reply = await compact(proxy, tokens=SHORT, name="work2", migrate=["a"])
        assert (status, reply["error"]["migrated"]) == (507, ["a"])
        await swept(proxy)
        assert {1, 2, 3} < set(await pools(proxy))
        status, reply = await compact(proxy, tokens=SHORT, name="work2", migrate=["b", "c"])
        assert (status, reply["compacted"]["released"]) == (200, [3, 2])


async def test_requests_that_run_on_the_old_pool_end_in_peace(tmp_path: Path) -> None:
    """A running request of a session that moves ends on the old pool, which goes then."""
    async with rig(tmp_path, FakeEngine(max_pools=5)) as proxy:
        await proxy.pool(tokens=SYS)
        await proxy.api.post("/polykv/pools/1/fork", json={"tokens": LONG})
        proxy.engine.hold()
        ask = {"prompt": [*LONG, 1], "pool_id": 2, "session_id": "a", "n_predict": 4}
        call = asyncio.ensure_future(proxy.call("/completion", ask))
        async with asyncio.timeout(20):
            while all(slot.state == "idle" for slot in proxy.engine.slots):
                await asyncio.sleep(0.005)
        making = asyncio.ensure_future(compact(proxy, 2, tokens=SHORT, migrate=["a"]))
        proxy.engine.go()
        _, new = await making
        assert (await call).headers["x-cached-prefix-tokens"] == "90"
        await proxy.settle()
        await swept(proxy)
        assert new["compacted"]["migrated"] == ["a"]
        assert await pools(proxy) == [1, 3]
