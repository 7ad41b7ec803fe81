"""What is left of a pool that was promised (`?wait=0`) and could not be made, over the fake engine."""

from pathlib import Path

import pytest

from polykv_proxy.core.attach import Wish
from polykv_proxy.core.ledger import LedgerLimits
from polykv_proxy.core.unmade import UNMADE_S
from polykv_proxy.errors import JournalError
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import Rig, rig, served

FULL = EngineFaultError(429, "no_seq_ids", "no sequence ids")
BROKEN = EngineFaultError(500, "server_error", "it broke")
REFUSED = EngineFaultError(400, "invalid_request_error", "not such a prompt")


async def promised(proxy: Rig, fault: EngineFaultError | None = None, **body: object) -> int:
    """Order a pool with `?wait=0` and wait until it is made, or is not: its id."""
    if fault is not None:
        proxy.engine.fail_next("prefill", fault)
    proxy.engine.hold()
    reply = await proxy.api.post("/polykv/pools?wait=0", json=body)
    assert reply.status_code == 202, reply.text
    flight = proxy.runtime.pools.flight(reply.json()["pool_id"])
    assert flight is not None
    proxy.engine.go()
    await flight.ended()
    return reply.json()["pool_id"]


async def shares(proxy: Rig, pool: object, **body: object) -> str:
    """How much a request shares whose beginning no slot holds: tokens, or why none."""
    for slot in proxy.engine.slots:
        slot.clear()
    reply = await proxy.call("/completion", {"prompt": [1, 2, 3], "pool_id": pool, **body})
    assert reply.status_code == 200, reply.text
    await proxy.settle()
    return reply.json()["opencoti"]["miss"] or reply.headers["x-cached-prefix-tokens"]


async def shown(proxy: Rig) -> dict[int, str]:
    return {pool["pool_id"]: pool["residency"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]}


async def test_failed_makings_fill_no_table(tmp_path: Path) -> None:
    """However many fail, a new pool finds room for its record; the latest reasons can be read."""
    async with rig(tmp_path, limits=LedgerLimits(max_pool_objects=3)) as proxy:
        for n in range(5):
            await promised(proxy, BROKEN, tokens=[1, n])
        assert await shown(proxy) == {3: "failed", 4: "failed", 5: "failed"}
        await proxy.pool(tokens=[7, 7])
        assert await shown(proxy) == {4: "failed", 5: "failed", 6: "resident"}


async def test_a_failed_making_says_when_it_goes_and_goes(tmp_path: Path) -> None:
    """`expires_ts` is the end of the time for which the reason can be read; then the sweep forgets it, session or not."""
    async with rig(tmp_path) as proxy:
        pool_id = await promised(proxy, BROKEN, tokens=[1, 2], name="p")
        failed = (await proxy.api.get("/polykv/pools/p")).json()
        assert (failed["residency"], failed["expires_ts"]) == ("failed", proxy.clock.now + UNMADE_S)
        assert "it broke" in failed["reason"]
        proxy.engine.fail_next("prefill", BROKEN)
        assert await shares(proxy, pool_id, session_id="s") == "rebuild_failed"
        proxy.clock.now += UNMADE_S - 1
        await proxy.runtime.sweep()
        assert await shown(proxy) == {1: "failed"}
        proxy.clock.now += 1
        await proxy.runtime.sweep()
        assert await shown(proxy) == {}
        assert (await proxy.api.get("/polykv/sessions/s")).json()["pool_id"] is None


@pytest.mark.parametrize(("fault", "miss"), [(FULL, "no_seq_ids"), (BROKEN, "rebuild_failed")])
async def test_a_passing_failure_is_tried_again_by_the_next_request(tmp_path: Path, fault: EngineFaultError, miss: str) -> None:
    """The pool is made then, is a pool like any other, and outlives the proxy."""
    async with served(FakeEngine(), tmp_path) as server:
        async with rig(tmp_path, server=server, state_dir=tmp_path / "state") as proxy:
            pool_id = await promised(proxy, fault, tokens=[1, 2], name="p", ttl_s=1000)
            proxy.engine.fail_next("prefill", fault)
            assert await shares(proxy, "p") == miss
            assert await shown(proxy) == {pool_id: "failed"}
            assert await shares(proxy, "p") == "2"
            made = (await proxy.api.get("/polykv/pools/p")).json()
            assert (made["residency"], made["reason"], made["expires_ts"], made["ttl_s"]) == ("resident", None, None, 1000)
        async with rig(tmp_path, server=server, state_dir=tmp_path / "state") as proxy:
            assert await shown(proxy) == {pool_id: "resident"}


async def test_a_lasting_failure_is_not_tried_again(tmp_path: Path) -> None:
    """What the engine refuses for what it is asked would be refused again: requests are served without it, and say so."""
    async with rig(tmp_path) as proxy:
        await promised(proxy, REFUSED, tokens=[1, 2])
        assert await shares(proxy, 1) == "rebuild_failed"
        assert proxy.engine.n_seqs_made == 0


async def test_what_the_journal_does_not_take_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another try whose record cannot be written gives its sequence back, and the one after that makes it."""
    async with rig(tmp_path) as proxy:
        await promised(proxy, BROKEN, tokens=[1, 2])

        async def full(*_args: object) -> None:
            raise JournalError("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(proxy.runtime.hub.journal, "save_pool", full)
            assert await shares(proxy, 1) == "rebuild_failed"
        failed = (await proxy.api.get("/polykv/pools/1")).json()
        assert (failed["residency"], failed["reason"], len(proxy.engine.seqs)) == ("failed", "the disk is full", 0)
        assert await shares(proxy, 1) == "2"


async def fork_fails(proxy: Rig) -> int:
    """A pool, a fork of it that was promised and fails with a reason that passes: the fork's id."""
    root = (await proxy.pool(tokens=[1, 2], name="root"))["pool_id"]
    proxy.engine.fail_next("prefill", BROKEN)
    proxy.engine.hold()
    reply = await proxy.api.post(f"/polykv/pools/{root}/fork?wait=0", json={"tokens": [1, 2, 3], "name": "fork"})
    flight = proxy.runtime.pools.flight(reply.json()["pool_id"])
    assert flight is not None
    proxy.engine.go()
    await flight.ended()
    return reply.json()["pool_id"]


@pytest.mark.parametrize("recursive", [0, 1])
async def test_a_fork_that_failed_keeps_nobody_from_releasing_its_parent(tmp_path: Path, recursive: int) -> None:
    """It is no child to wait for: parent and record go at once, and a session that was on it is on nothing."""
    async with rig(tmp_path) as proxy:
        fork_id = await fork_fails(proxy)
        assert await shown(proxy) == {1: "resident", fork_id: "failed"}
        released = await proxy.api.delete(f"/polykv/pools/root?recursive={recursive}")
        assert (released.status_code, await shown(proxy), proxy.engine.seqs) == (200, {}, {})
        assert (await proxy.pool(tokens=[4], name="fork"))["pool_id"] == fork_id + 1


async def test_a_fork_that_failed_keeps_no_parent_beyond_its_time(tmp_path: Path) -> None:
    """A parent that nobody uses goes when its time to live is over."""
    async with rig(tmp_path) as proxy:
        await fork_fails(proxy)
        await proxy.api.post("/polykv/pools/root/renew", json={"ttl_s": 1})
        proxy.clock.now += 2
        await proxy.runtime.sweep()
        assert await shown(proxy) == {}


async def test_a_fork_that_failed_stays_while_a_request_names_it(tmp_path: Path) -> None:
    """What runs keeps its record, and a record its parent, as long as that takes."""
    async with rig(tmp_path) as proxy:
        fork_id = await fork_fails(proxy)
        ledger = proxy.runtime.hub.ledger
        req = ledger.take_req()
        ledger.admit(req, Wish(pool="fork"), proxy.clock.now)
        refused = await proxy.api.delete("/polykv/pools/root")
        assert (refused.status_code, refused.json()["error"]["children"]) == (409, [fork_id])
        assert await shown(proxy) == {1: "resident", fork_id: "failed"}
        proxy.runtime.hub.post(ledger.abandon(req, proxy.clock.now))
        assert (await proxy.api.delete("/polykv/pools/root")).status_code == 200


async def session(proxy: Rig) -> None:
    await proxy.call("/completion", {"prompt": [1, 2, 3], "session_id": "s", "n_predict": 1})
    await proxy.settle()


@pytest.mark.parametrize("path", ["/polykv/pools", "/polykv/pools/root/fork"])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"from_session": "nobody"}, "session_not_found"),
        ({"from_session": "gone"}, "session_not_resident"),
        ({"from_session": "nobody", "rebuild": True}, "session_not_found"),
        ({"from_session": "s", "n_tokens": 99}, "invalid_request"),
    ],
)
async def test_what_a_session_does_not_have_is_said_at_once(tmp_path: Path, path: str, body: dict, code: str) -> None:
    """`?wait=0` promises nothing that is known to be impossible: the error is the answer, and no record is left."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=[1, 2], name="root")
        await proxy.call("/completion", {"prompt": [5, 6], "session_id": "gone", "n_predict": 1})
        await proxy.settle()
        for slot in proxy.engine.slots:
            slot.clear()
        await session(proxy)
        reply = await proxy.api.post(f"{path}?wait=0", json={**body, "name": "snap"})
        assert reply.json()["error"]["code"] == code
        assert await shown(proxy) == {1: "resident"}


async def test_a_fork_of_what_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    """Parents that are unknown or could not be made are refused, also with `?wait=0`."""
    async with rig(tmp_path) as proxy:
        await promised(proxy, BROKEN, tokens=[1, 2])
        for parent, code in ((9, "pool_not_found"), (1, "conflict")):
            reply = await proxy.api.post(f"/polykv/pools/{parent}/fork?wait=0", json={"tokens": [1, 2, 3]})
            assert reply.json()["error"]["code"] == code
        assert await shown(proxy) == {1: "failed"}


async def test_a_snapshot_is_there_when_it_is_answered(tmp_path: Path) -> None:
    """It computes nothing, so `?wait=0` has its outcome: the pool, or why there is none, and never a pool without tokens."""
    async with rig(tmp_path) as proxy:
        await session(proxy)
        proxy.engine.fail_next("seqs", FULL)
        full = await proxy.api.post("/polykv/pools?wait=0", json={"from_session": "s", "name": "snap"})
        assert (full.status_code, await shown(proxy)) == (429, {})
        made = await proxy.api.post("/polykv/pools?wait=0", json={"from_session": "s", "name": "snap"})
        assert (made.status_code, made.json()["name"], made.json()["prefix_len"]) == (201, "snap", 4)


async def test_a_session_that_is_computed_again_has_its_tokens_and_name_at_once(tmp_path: Path) -> None:
    """With `rebuild` there is work to wait for: 202, and a failure of it is tried again like any other."""
    async with rig(tmp_path) as proxy:
        await session(proxy)
        for slot in proxy.engine.slots:
            slot.clear()
        await promised(proxy, BROKEN, from_session="s", rebuild=True, name="again")
        failed = (await proxy.api.get("/polykv/pools/again")).json()
        assert (failed["residency"], failed["prefix_len"], failed["source"]) == ("failed", 3, "last_turn")
        assert await shares(proxy, "again") == "2"


async def test_a_restart_forgets_what_was_never_made(tmp_path: Path) -> None:
    """A failed making is in no journal: after a restart its name is unknown, and free."""
    async with served(FakeEngine(), tmp_path) as server:
        async with rig(tmp_path, server=server, state_dir=tmp_path / "state") as proxy:
            await promised(proxy, BROKEN, tokens=[1, 2], name="p")
        async with rig(tmp_path, server=server, state_dir=tmp_path / "state") as proxy:
            assert await shown(proxy) == {}
            assert (await proxy.pool(tokens=[3], name="p"))["pool_id"] == 2


async def test_the_name_of_a_failed_making_is_free_while_requests_run_without_it(tmp_path: Path) -> None:
    """Another prefix takes the name at once."""
    async with rig(tmp_path) as proxy:
        await promised(proxy, REFUSED, tokens=[1, 2], name="p")
        hub = proxy.runtime.hub
        req = hub.ledger.take_req()
        hub.ledger.admit(req, Wish(pool="p"), proxy.clock.now)
        assert (await proxy.pool(tokens=[3, 4], name="p"))["pool_id"] == 2
        assert await shown(proxy) == {1: "failed", 2: "resident"}
        hub.post(hub.ledger.abandon(req, proxy.clock.now))
