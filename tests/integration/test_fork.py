"""`POST /polykv/pools/{id}/fork`: extend and branch from every source, the contract, and what becomes of it."""

import asyncio
from pathlib import Path

import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import Rig, rig, served

SYSTEM = "You are a careful agent with many tools and a long memory"
BASE = list(range(100, 140))


async def fork(proxy: Rig, parent: object, **body: object) -> dict:
    reply = await proxy.api.post(f"/polykv/pools/{parent}/fork", json=body)
    assert reply.status_code == 201, reply.text
    assert reply.headers["location"] == f"/polykv/pools/{reply.json()['pool_id']}"
    return reply.json()


async def refused(proxy: Rig, parent: object, **body: object) -> tuple[int, dict]:
    reply = await proxy.api.post(f"/polykv/pools/{parent}/fork", json=body)
    assert reply.status_code >= 400, reply.text
    return reply.status_code, reply.json()["error"]


async def test_an_extension_computes_only_what_it_adds(tmp_path: Path) -> None:
    """A child that begins with its whole parent shares all of it and pays for its own tokens only."""
    async with rig(tmp_path) as proxy:
        root = await proxy.pool(tokens=BASE, name="root")
        before = proxy.engine.computed
        child = await fork(proxy, "root", tokens=[*BASE, 7, 8, 9])
        assert (child["parent"], child["branch_pos"], child["prefix_len"], child["n_shared"]) == (root["pool_id"], 40, 43, 40)
        assert proxy.engine.computed - before == 3
        assert proxy.engine.used_cells() == 43
        assert (await proxy.api.get("/polykv/pools")).json()["tree_depth"] == 2
        reply = await proxy.call("/completion", {"prompt": [*BASE, 7, 8, 9, 5], "pool_id": child["pool_id"], "n_predict": 1})
        assert reply.headers["x-cached-prefix-tokens"] == "43"


@pytest.mark.parametrize(("wanted", "branch"), [(None, 25), (25, 25), (10, 10), (1, 1)])
async def test_a_branch_leaves_at_the_first_difference_or_before(tmp_path: Path, wanted: int | None, branch: int) -> None:
    """Without `branch_pos` the longest common prefix is shared; a smaller one is honoured."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        body = {"branch_pos": wanted} if wanted is not None else {}
        child = await fork(proxy, 1, tokens=[*BASE[:25], 7, 8], **body)
        assert (child["branch_pos"], child["n_shared"]) == (branch, branch)
        assert proxy.engine.used_cells() == 40 + 27 - branch


async def test_a_mismatch_names_the_position_and_the_text_around_it(tmp_path: Path) -> None:
    """409 says where both differ first and shows what stands there on either side."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        status, error = await refused(proxy, 1, prompt=SYSTEM.replace("many", "few"), branch_pos=9)
        assert (status, error["code"], error["param"], error["first_differing_position"]) == (
            409,
            "prefix_mismatch",
            "branch_pos",
            7,
        )
        assert "many tools" in error["parent_text"]
        assert "few tools" in error["prefix_text"]
        assert len(proxy.runtime.hub.ledger.tree) == 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"tokens": [7, 8, 9]}, 400, "at least one token"),
        ({"tokens": BASE}, 400, "attach to it instead"),
        ({"tokens": BASE[:20]}, 400, "attach to it instead"),
        ({"tokens": [*BASE, 1], "branch_pos": 0}, 400, "at least 1"),
        ({"tokens": [*BASE, 1], "branch_pos": 41}, 409, "the pool ends there"),
        ({"tokens": [*BASE[:20]], "branch_pos": 30}, 409, "the given prefix ends there"),
        ({"tokens": [*BASE, 1], "branch_pos": True}, 400, "branch_pos"),
        ({"branch_pos": 3}, 400, "exactly one"),
    ],
)
async def test_what_is_no_fork_is_refused_and_leaves_nothing(tmp_path: Path, body: dict, status: int, words: str) -> None:
    """A fork shares at least one token, adds at least one, and never more is shared than agrees."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        got, error = await refused(proxy, 1, **body)
        assert got == status
        assert words in error["message"]
        assert len(proxy.runtime.hub.ledger.tree) == len(proxy.engine.seqs) == 1


async def test_an_unknown_parent_is_404(tmp_path: Path) -> None:
    """The parent must be there."""
    async with rig(tmp_path) as proxy:
        assert (await refused(proxy, 5, tokens=BASE))[0] == 404
        assert (await refused(proxy, "nobody", tokens=BASE))[0] == 404


async def test_messages_fork_at_the_end_of_what_they_share(tmp_path: Path) -> None:
    """A conversation that goes on is an extension of the pool of its beginning."""
    async with rig(tmp_path) as proxy:
        head = [{"role": "system", "content": SYSTEM}]
        root = await proxy.pool(messages=head)
        more = [*head, {"role": "user", "content": "the task"}, {"role": "assistant", "content": "I see"}]
        child = await fork(proxy, 1, messages=more)
        assert child["branch_pos"] == child["n_shared"] == root["prefix_len"]


async def test_a_session_forks_without_computing_anything(tmp_path: Path) -> None:
    """The session's KV becomes the child; it shares with the parent what the session does."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE, name="root")
        await proxy.call("/completion", {"prompt": [*BASE, 7, 8], "pool_id": 1, "session_id": "main", "n_predict": 3})
        await proxy.settle()
        before = proxy.engine.computed
        child = await fork(proxy, "root", from_session="main", name="work")
        assert (child["branch_pos"], child["prefix_len"], child["n_shared"], child["source"]) == (40, 45, 40, "from_session")
        assert proxy.engine.computed == before
        status, error = await refused(proxy, "root", from_session="main", n_tokens=40)
        assert (status, "attach to it instead" in error["message"]) == (400, True)
        await proxy.pool(tokens=[5, *BASE], name="other")
        status, error = await refused(proxy, "other", from_session="main", branch_pos=2)
        assert (status, error["first_differing_position"]) == (409, 0)
        assert len(proxy.engine.seqs) == 3


async def test_the_same_name_and_prefix_is_the_pool_there_is(tmp_path: Path) -> None:
    """A repeated fork by name is 200, another prefix 409; a key is answered alike."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        child = await fork(proxy, 1, tokens=[*BASE, 7], name="kid")
        again = await proxy.api.post("/polykv/pools/1/fork", json={"tokens": [*BASE, 7], "name": "kid"})
        assert (again.status_code, again.json()["pool_id"]) == (200, child["pool_id"])
        assert (await refused(proxy, 1, tokens=[*BASE, 8], name="kid"))[1]["code"] == "name_taken"
        keyed = [
            await proxy.api.post("/polykv/pools/1/fork", json={"tokens": [*BASE, 9]}, headers={"idempotency-key": "k"})
            for _ in "ab"
        ]
        assert [reply.status_code for reply in keyed] == [201, 201]
        assert keyed[0].text == keyed[1].text


async def test_progress_and_202_work_as_for_a_new_pool(tmp_path: Path) -> None:
    """`stream` tells how far it is, `wait=0` answers with an id that requests can wait on."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        async with proxy.api.stream("POST", "/polykv/pools/1/fork?stream=1", json={"tokens": [*BASE, *range(300, 500)]}) as reply:
            text = "".join([part async for part in reply.aiter_text()])
        assert '"cached": 40' in text
        assert text.rindex("event: done") > text.index("event: progress")
        proxy.engine.hold()
        taken = await proxy.api.post("/polykv/pools/1/fork?wait=0", json={"tokens": [*BASE, 5, 6]})
        assert (taken.status_code, taken.json()["residency"]) == (202, "materializing")
        call = asyncio.ensure_future(proxy.call("/completion", {"prompt": [*BASE, 5, 6, 7], "pool_id": 3, "n_predict": 1}))
        proxy.engine.go()
        assert (await call).headers["x-cached-prefix-tokens"] == "42"


async def test_a_fork_waits_for_a_parent_that_is_being_made(tmp_path: Path) -> None:
    """The child begins when its parent is there; a parent that fails takes the fork with it."""
    async with rig(tmp_path) as proxy:
        proxy.engine.hold()
        await proxy.api.post("/polykv/pools?wait=0", json={"tokens": BASE})
        child = asyncio.ensure_future(fork(proxy, 1, tokens=[*BASE, 5]))
        await asyncio.sleep(0)
        proxy.engine.go()
        assert (await child)["n_shared"] == 40
        proxy.engine.hold()
        proxy.engine.fail_next("prefill", EngineFaultError(500, "server_error", "no"))
        failing = asyncio.ensure_future(proxy.api.post("/polykv/pools", json={"tokens": [9, 9, 9], "name": "bad"}))
        async with asyncio.timeout(20):
            while proxy.runtime.pools.flight(3) is None:
                await asyncio.sleep(0.005)
        child = asyncio.ensure_future(proxy.api.post("/polykv/pools/bad/fork", json={"tokens": [9, 9, 9, 1]}))
        await asyncio.sleep(0.05)
        proxy.engine.go()
        assert (await failing).status_code == 502
        assert (await child).status_code == 404


async def test_parents_are_rebuilt_before_their_children(tmp_path: Path) -> None:
    """After a crash of the engine an attach to a grandchild brings the whole line back, root first, each token computed once."""
    engine = FakeEngine()
    async with served(engine, tmp_path) as server, rig(tmp_path, engine, server) as proxy:
        await proxy.pool(tokens=BASE)
        await fork(proxy, 1, tokens=[*BASE, 5, 6])
        await fork(proxy, 2, tokens=[*BASE, 5, 7, 8])
        await server.crash()
        await proxy.until_unlinked()
        await server.restart()
        await proxy.until_linked(engine.boot_id)
        engine.computed = 0
        reply = await proxy.call("/completion", {"prompt": [*BASE, 5, 7, 8, 1], "pool_id": 3, "n_predict": 1})
        assert reply.headers["x-cached-prefix-tokens"] == "43"
        assert engine.computed == 40 + 2 + 2 + 1
        shown = (await proxy.api.get("/polykv/pools")).json()["pools"]
        assert [(p["residency"], p["n_shared"]) for p in shown] == [("resident", 0), ("resident", 40), ("resident", 41)]


async def test_a_parent_that_the_engine_lost_is_brought_back_for_a_fork(tmp_path: Path) -> None:
    """`stale_seq` for the parent makes it lost; it is rebuilt and the fork goes on."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        proxy.engine.seqs.clear()
        child = await fork(proxy, 1, tokens=[*BASE, 5])
        assert child["n_shared"] == 40
        assert (await proxy.api.get("/polykv/pools/1")).json()["residency"] == "resident"


async def test_the_tree_survives_a_restart_of_the_proxy(tmp_path: Path) -> None:
    """The journal holds each pool's own tokens; a new proxy shows the same tree and adopts its KV."""
    engine = FakeEngine()
    async with served(engine, tmp_path) as server:
        async with rig(tmp_path, engine, server, state_dir=tmp_path / "s") as proxy:
            await proxy.pool(tokens=BASE)
            await fork(proxy, 1, tokens=[*BASE[:30], 5, 6])
            before = (await proxy.api.get("/polykv/pools")).json()["pools"]
        async with rig(tmp_path, engine, server, state_dir=tmp_path / "s") as proxy:
            assert (await proxy.api.get("/polykv/pools")).json()["pools"] == before
            assert (await proxy.api.delete("/polykv/pools/1")).json()["error"]["children"] == [2]
            for pool_id in (2, 1):
                assert (await proxy.api.delete(f"/polykv/pools/{pool_id}")).status_code == 200
        assert engine.used_cells() == 0


async def test_a_client_that_leaves_a_fork_takes_it_along(tmp_path: Path) -> None:
    """Without name or key a cancelled fork leaves no record, no sequence and no hold on its parent."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=BASE)
        proxy.engine.hold()
        flight = asyncio.ensure_future(proxy.api.post("/polykv/pools/1/fork", json={"tokens": [*BASE, 5]}))
        async with asyncio.timeout(20):
            while proxy.runtime.pools.flight(2) is None:
                await asyncio.sleep(0.005)
        proxy.runtime.pools.flight(2).cancel()  # type: ignore[union-attr]
        assert (await flight).status_code == 409
        proxy.engine.go()
        assert len(proxy.runtime.hub.ledger.tree) == 1
        assert (await proxy.api.delete("/polykv/pools/1")).status_code == 200


async def test_an_engine_that_dies_in_a_fork_takes_only_the_fork(tmp_path: Path) -> None:
    """The caller hears of it, no child is left, and with the engine back the parent and a new fork are made as if nothing was."""
    engine = FakeEngine()
    async with served(engine, tmp_path) as server, rig(tmp_path, engine, server) as proxy:
        await proxy.pool(tokens=BASE)
        engine.hold()
        making = asyncio.ensure_future(proxy.api.post("/polykv/pools/1/fork", json={"tokens": [*BASE, *range(300, 500)]}))
        async with asyncio.timeout(20):
            while (flight := proxy.runtime.pools.flight(2)) is None or flight.latest is None or flight.latest.progress is None:
                await asyncio.sleep(0.005)
        await server.crash()
        assert (await making).status_code == 503
        await proxy.until_unlinked()
        await server.restart()
        await proxy.until_linked(engine.boot_id)
        assert [pool.pool_id for pool in proxy.runtime.hub.ledger.tree] == [1]
        child = await fork(proxy, 1, tokens=[*BASE, 5])
        assert (child["pool_id"], child["n_shared"]) == (3, 40)
        assert engine.used_cells() == 41


async def test_a_child_is_built_on_the_nearest_that_has_kv(tmp_path: Path) -> None:
    """With no id for its evicted parent a grandchild shares with the root what both begin with."""
    async with rig(tmp_path, FakeEngine(max_pools=3)) as proxy:
        await proxy.pool(tokens=BASE)
        await fork(proxy, 1, tokens=[*BASE[:35], 5, 6])
        await fork(proxy, 2, tokens=[*BASE[:35], 5, 7])
        for pool_id in (3, 2):
            await proxy.api.post(f"/polykv/pools/{pool_id}/evict")
        await proxy.pool(tokens=[9, 9, 9])
        for pool_id in (1, 4):
            await proxy.api.post(f"/polykv/pools/{pool_id}/pin")
        reply = await proxy.call("/completion", {"prompt": [*BASE[:35], 5, 7, 8], "pool_id": 3, "n_predict": 1})
        assert reply.headers["x-cached-prefix-tokens"] == "37"
        shown = (await proxy.api.get("/polykv/pools")).json()["pools"]
        assert [(p["residency"], p["n_shared"], p["own_kv_bytes"]) for p in shown[:3]] == [
            ("resident", 0, 4000),
            ("evicted", 0, 0),
            ("resident", 35, 200),
        ]


async def test_a_child_is_made_alone_where_its_parent_has_no_room(tmp_path: Path) -> None:
    """With one sequence id left a child whose parent was evicted is rebuilt in full, shares nothing, and answers."""
    async with rig(tmp_path, FakeEngine(max_pools=2)) as proxy:
        await proxy.pool(tokens=BASE)
        await fork(proxy, 1, tokens=[*BASE, 5, 6])
        await proxy.api.post("/polykv/pools/1/flush")
        await proxy.pool(tokens=[9, 9, 9])
        await proxy.api.post("/polykv/pools/3/pin")
        reply = await proxy.call("/completion", {"prompt": [*BASE, 5, 6, 7], "pool_id": 2, "n_predict": 1})
        assert reply.headers["x-cached-prefix-tokens"] == "42"
        shown = (await proxy.api.get("/polykv/pools/2")).json()
        assert (shown["residency"], shown["n_shared"], shown["own_kv_bytes"]) == ("resident", 0, 4200)
