"""The self-check of pools over the fake engine: what is found, what is replaced, and what nobody notices of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polykv_proxy.api.context import Keys
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import Rig, rig, served
from tests.integration.verify_rig import BASE, CHILD, corrupt, family, seq_of, shown, use, verify


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Rig]:
    async with family(tmp_path) as made:
        yield made


async def test_a_pool_that_is_right_is_ok(proxy: Rig) -> None:
    """The verdict with its figures; the pool keeps its sequence, and its record says when it was verified."""
    before = await proxy.api.get("/polykv/pools")
    seq, proxy.engine.computed = seq_of(proxy, 2), 0
    found = await verify(proxy, 2)
    assert (found["verdict"], found["reason"], found["residency"], found["quarantined"]) == ("ok", None, "resident", [])
    assert (found["max_abs_diff"], found["tolerance"], found["n_positions"]) == (0, 0.2, 12)
    assert [place["position"] for place in found["positions"]][-4:] == [48, 50, 51, 52]
    assert found["n_tokens_computed"] == proxy.engine.computed == 51 + 1 + 12 + 13
    assert seq_of(proxy, 2) == seq
    now = await shown(proxy, 2)
    assert (now["n_verifies"], now["n_mismatches"], now["verify_verdict"], now["verified_ts"]) == (1, 0, "ok", proxy.clock.now)
    after = (await proxy.api.get("/polykv/pools")).json()
    assert (after["other_kv_bytes"], after["kv_bytes"]) == (before.json()["other_kv_bytes"], before.json()["kv_bytes"])
    assert len(proxy.runtime.hub.ledger.books) == 0


async def test_rounding_is_no_mismatch(proxy: Rig) -> None:
    """What two computations without the pool differ by is not held against it: that is measured where the least is not enough."""
    proxy.engine.kv.rounding = 0.3
    for pool in (1, 2, 3, 4):
        found = await verify(proxy, pool)
        assert found["verdict"] == "ok", found
        assert found["max_abs_diff"] > 0.2
        assert found["tolerance"] > 0.6
    corrupt(proxy, 2, 45)
    assert (await verify(proxy, 2))["verdict"] == "mismatch"


async def test_asked_for_positions_are_looked_at(proxy: Rig) -> None:
    """These positions, or so many; a wrong cell is seen by every answer that looks at it and by no other."""
    corrupt(proxy, 1, 20)
    assert [p["ok"] for p in (await verify(proxy, 1, positions=[5, 21]))["positions"]] == [True, True]
    assert (await verify(proxy, 5, n_positions=2))["n_positions"] == 2
    found = await verify(proxy, 1, positions=[22, 41, 5])
    assert found["verdict"] == "mismatch"
    assert [(p["position"], p["ok"]) for p in found["positions"]] == [(5, True), (22, False), (41, False)]
    assert "first at position 22" in found["reason"]


async def test_a_wrong_cell_takes_all_with_it_who_hold_it(proxy: Rig) -> None:
    """A cell of 1 that 2 and 3 share and 4 does not: three pools are made anew, parents first, and the fourth keeps its KV. All are
    right again, their pins hold, and their requests attach to what is new.
    """
    await proxy.api.post("/polykv/pools/2/pin", json={"owner": "me"})
    old = {pool: seq_of(proxy, pool) for pool in range(1, 6)}
    corrupt(proxy, 1, 35)
    found = await verify(proxy, 3, positions=[31, 38, 53])
    assert (found["verdict"], found["quarantined"], found["residency"]) == ("mismatch", [1, 2, 3, 4], "resident")
    new = {pool: seq_of(proxy, pool) for pool in range(1, 6)}
    assert [pool for pool in old if old[pool] == new[pool]] == [5]
    assert {str(seq.ref) for seq in proxy.engine.seqs.values()} == set(new.values())
    assert proxy.engine.used_cells() == 40 + 10 + 2 + 2 + 3
    assert ((await shown(proxy, 2))["pin_owner"], (await shown(proxy, 3))["n_mismatches"]) == ("me", 1)
    for pool in (1, 2, 3, 4):
        assert (await verify(proxy, pool))["verdict"] == "ok"
    assert (await use(proxy, 3, [*CHILD, 7, 8, 1])).headers["x-cached-prefix-tokens"] == "52"


async def test_a_pool_s_own_wrong_cell_leaves_its_parent_alone(proxy: Rig) -> None:
    """The parent and the siblings keep their KV; what is below is made anew with it."""
    kept = {pool: seq_of(proxy, pool) for pool in (1, 4, 5)}
    corrupt(proxy, 2, 45)
    assert (await verify(proxy, 2))["quarantined"] == [2, 3]
    assert {pool: seq_of(proxy, pool) for pool in kept} == kept


async def test_what_is_wrong_further_up_is_found_when_the_pool_was_made_anew(proxy: Rig) -> None:
    """Only the place past the end is looked at, so the blame falls on the pool; anew on its parent it still differs, and what the
    parent made goes as well.
    """
    corrupt(proxy, 1, 20)
    found = await verify(proxy, 3, positions=[53])
    assert (found["verdict"], found["quarantined"]) == ("mismatch", [1, 2, 3, 4])
    assert (await verify(proxy, 1))["verdict"] == (await verify(proxy, 3))["verdict"] == "ok"


async def test_other_tokens_in_the_engine_are_a_mismatch(proxy: Rig) -> None:
    """The engine's own list is compared first: it costs nothing."""
    seq = proxy.engine.seq(seq_of(proxy, 5))
    assert seq is not None
    seq.tokens, proxy.engine.computed = [5, 6, 8], 0
    found = await verify(proxy, 5)
    assert (found["verdict"], found["n_positions"], found["quarantined"]) == ("mismatch", 0, [5])
    assert "other tokens" in found["reason"]
    assert (found["n_tokens_computed"], proxy.engine.computed) == (0, 3)


async def test_a_pool_that_differs_even_when_made_anew_is_not_used(proxy: Rig) -> None:
    """It fails; a request that names it is served without it, and says so. Those below are made on what is above, those above are
    for the next check.
    """
    corrupt(proxy, 2, 45)
    proxy.engine.kv.spoils = True
    found = await verify(proxy, 2)
    assert (found["verdict"], found["residency"]) == ("mismatch", "failed")
    assert "not used any more" in found["reason"]
    proxy.engine.kv.spoils = False
    reply = await use(proxy, 2, [*CHILD, 1])
    assert (reply.headers["x-cached-prefix-tokens"], reply.json()["opencoti"]["miss"]) == ("0", "rebuild_failed")
    assert (await verify(proxy, 1))["verdict"] == "mismatch"
    assert (await use(proxy, 3, [*CHILD, 7, 8, 1])).headers["x-cached-prefix-tokens"] == "52"
    assert (await verify(proxy, 3))["verdict"] == "ok"


async def test_a_running_request_is_not_broken_and_its_slot_is_emptied_after_it(proxy: Rig) -> None:
    """It ends as it would have; the next turn of its session finds nothing of the wrong KV. So it is with idle slots at once."""
    await use(proxy, 2, [*CHILD, 1], session_id="idle")
    await use(proxy, 2, [*CHILD, 2])
    last = Last(proxy.engine)
    running = asyncio.ensure_future(use(proxy, 2, [*CHILD, 3], session_id="busy", n_predict=200))
    busy = await _generating(proxy)
    last.stop()
    corrupt(proxy, 2, 45)
    assert (await verify(proxy, 2))["verdict"] == "mismatch"
    held = [slot for slot in proxy.engine.slots if slot is not busy and slot.seq is not None]
    assert held == []
    assert busy.state == "generating"
    snapshot = await proxy.api.post("/polykv/pools", json={"from_session": "busy"})
    assert (snapshot.status_code, snapshot.json()["error"]["code"]) == (409, "session_not_resident")
    last.go_on.set()
    assert (await running).json()["stop_type"] == "limit"
    await proxy.settle()
    proxy.engine.computed = 0
    for session in ("busy", "idle"):
        reply = await use(proxy, 2, [*CHILD, 3, 4], session_id=session)
        assert reply.headers["x-cached-prefix-tokens"] == "50"
    assert not [slot for slot in proxy.engine.slots if slot.seq not in {None, seq_of(proxy, 2)}]


class Last:
    """The request that the fake engine worked on last can be stopped between two tokens while it works on others."""

    def __init__(self, engine: FakeEngine) -> None:
        self.go_on = asyncio.Event()
        self._gate, engine.gate = engine.gate, self._pass  # type: ignore[method-assign]
        self._last: asyncio.Task | None = None
        self._stopped: asyncio.Task | None = None

    async def _pass(self) -> None:
        self._last = task = asyncio.current_task()
        await self._gate()
        if task is self._stopped:
            await self.go_on.wait()

    def stop(self) -> None:
        """Until `go_on` is set."""
        self._stopped = self._last


async def _generating(proxy: Rig) -> object:
    async with asyncio.timeout(20):
        while not (busy := [slot for slot in proxy.engine.slots if slot.state == "generating"]):
            await asyncio.sleep(0)
    return busy[0]


async def test_requests_wait_for_the_rebuild_and_are_never_served_from_what_is_wrong(proxy: Rig) -> None:
    """From the moment of the verdict a request that names the pool is held; it gets the new sequence."""
    corrupt(proxy, 2, 45)
    old = seq_of(proxy, 2)
    tree = proxy.runtime.hub.ledger.tree
    checking = asyncio.ensure_future(verify(proxy, 2))
    async with asyncio.timeout(20):
        while (pool := tree.get(2)) is not None and pool.residency.value != "quarantined":
            await asyncio.sleep(0)
    reply = await use(proxy, 2, [*CHILD, 1])
    assert (await checking)["verdict"] == "mismatch"
    assert seq_of(proxy, 2) != old
    assert reply.headers["x-cached-prefix-tokens"] == "50"
    assert [slot.seq for slot in proxy.engine.slots if slot.n_shared] == [seq_of(proxy, 2)]


async def test_a_fork_that_was_being_made_on_it_is_made_again(proxy: Rig) -> None:
    """It was computed on wrong cells: nobody sees that sequence."""
    corrupt(proxy, 1, 20)
    checking = asyncio.ensure_future(verify(proxy, 1))
    forking = asyncio.ensure_future(proxy.api.post("/polykv/pools/1/fork", json={"tokens": [*BASE, *range(300, 1500)]}))
    assert (await checking)["verdict"] == "mismatch"
    made = (await forking).json()
    assert made["n_shared"] == 40
    assert (await verify(proxy, made["pool_id"]))["verdict"] == "ok"
    assert len(proxy.engine.seqs) == 6


async def test_after_a_restart_a_quarantined_pool_is_made_from_tokens(tmp_path: Path) -> None:
    """It could not be made anew in time; the journal does not say that there was KV, and no proxy believes it."""
    async with served(FakeEngine(), tmp_path) as server:
        async with rig(tmp_path, server=server, state_dir=tmp_path / "state") as proxy:
            await proxy.pool(tokens=BASE, name="base")
            corrupt(proxy, 1, 20)
            server.engine.fail_next("seqs", EngineFaultError(500, "server_error", "no"))
            found = await verify(proxy, "base")
            assert (found["verdict"], found["quarantined"], found["residency"]) == ("mismatch", [1], "lost")
        assert server.engine.seqs == {}
        async with rig(tmp_path, server=server, state_dir=tmp_path / "state") as proxy:
            assert (await shown(proxy, "base"))["residency"] == "lost"
            assert (await use(proxy, 1, [*BASE, 1])).headers["x-cached-prefix-tokens"] == "40"
            assert (await verify(proxy, 1))["verdict"] == "ok"


# -- what cannot be said ------------------------------------------------------------------------------------------------------


async def test_without_kv_there_is_nothing_to_verify(proxy: Rig) -> None:
    """An evicted pool is inconclusive, computes nothing and is not brought back; its last verdict stands."""
    await verify(proxy, 3)
    await proxy.api.post("/polykv/pools/3/evict")
    proxy.engine.computed = 0
    found = await verify(proxy, 3)
    assert (found["verdict"], found["residency"], proxy.engine.computed) == ("inconclusive", "evicted", 0)
    assert "nothing to verify" in found["reason"]
    now = await shown(proxy, 3)
    assert (now["n_verifies"], now["verify_verdict"], now["verified_ts"]) == (2, "ok", proxy.clock.now)


async def test_without_room_nothing_is_begun(tmp_path: Path) -> None:
    """A check that would leave less than a twentieth of the cells is inconclusive; no pool and no idle session loses anything."""
    async with rig(tmp_path, FakeEngine(n_ctx=100)) as proxy:
        await proxy.pool(tokens=BASE)
        await proxy.pool(tokens=list(range(300, 335)))
        used = proxy.engine.used_cells()
        found = await verify(proxy, 1)
        assert (found["verdict"], proxy.engine.used_cells()) == ("inconclusive", used)
        assert "no room" in found["reason"]


@pytest.mark.parametrize(
    ("fault", "status", "verdict"),
    [
        (EngineFaultError(400, "exceed_context_size_error", "the KV cache is full"), 200, "inconclusive"),
        (EngineFaultError(500, "server_error", "broken"), 200, "inconclusive"),
        (EngineFaultError(503, "unavailable_error", "Loading model"), 200, "inconclusive"),
    ],
)
async def test_a_refusal_of_the_engine_is_no_verdict(proxy: Rig, fault: EngineFaultError, status: int, verdict: str) -> None:
    """What the engine said is the reason; the next check is as good as any."""
    proxy.engine.fail_next("complete", fault)
    reply = await proxy.api.post("/polykv/pools/2/verify")
    assert (reply.status_code, reply.json()["verdict"]) == (status, verdict)
    assert fault.message in reply.json()["reason"]
    assert (await verify(proxy, 2))["verdict"] == "ok"


async def test_a_pool_that_was_not_used_is_no_verdict(proxy: Rig) -> None:
    """The sequence is gone: the engine says `stale_seq`, and nothing is quarantined. Without log-probs likewise."""
    pooled, proxy.engine.kv.candidates = proxy.engine.kv.candidates, lambda _cells, _n: []  # type: ignore[method-assign]
    assert "no log-probs" in (await verify(proxy, 2))["reason"]
    proxy.engine.kv.candidates = pooled  # type: ignore[method-assign]
    number = int(seq_of(proxy, 2).partition(".")[0])
    del proxy.engine.seqs[number]
    found = await verify(proxy, 2)
    assert (found["verdict"], found["quarantined"]) == ("inconclusive", [])
    assert "gone" in found["reason"]


async def test_a_slot_that_held_the_same_tokens_is_not_mistaken_for_the_pool(tmp_path: Path) -> None:
    """Its own cells are as long as the pool's: they are put away, and the pool is looked at."""
    async with rig(tmp_path, FakeEngine(n_slots=1)) as proxy:
        await proxy.pool(tokens=BASE)
        await proxy.call("/completion", {"prompt": [*BASE, *BASE[13:14], *BASE[26:27], 5], "n_predict": 1})
        corrupt(proxy, 1, 20)
        assert (await verify(proxy, 1))["verdict"] == "mismatch"


# -- who asks, and who leaves ---------------------------------------------------------------------------------------------------


async def test_errors_say_what_is_wrong(proxy: Rig) -> None:
    """404, 409 while made or released, 400 for positions that are none, each with its field."""

    async def error(pool: object, **body: object) -> tuple[int, str, object]:
        reply = await proxy.api.post(f"/polykv/pools/{pool}/verify", json=body)
        return reply.status_code, reply.json()["error"]["code"], reply.json()["error"]["param"]

    assert await error(99) == (404, "pool_not_found", "pool_id")
    assert await error(1, positions=[1]) == (400, "invalid_request", "positions")
    assert await error(1, positions=[43]) == (400, "invalid_request", "positions")
    assert await error(1, positions=[]) == (400, "invalid_request", "positions")
    assert await error(1, positions=[5], n_positions=2) == (400, "invalid_request", "n_positions")
    assert await error(1, n_positions=0) == (400, "invalid_request", "n_positions")
    assert await error(1, places=[5]) == (400, "invalid_request", "places")
    running = asyncio.ensure_future(use(proxy, 3, [*CHILD, 7, 8, 3], n_predict=2000))
    await _generating(proxy)
    assert (await proxy.api.delete("/polykv/pools/3")).status_code == 202
    assert await error(3) == (409, "pool_releasing", "pool_id")
    await running
    proxy.engine.hold()
    await proxy.api.post("/polykv/pools?wait=0", json={"tokens": [1, 2], "name": "made"})
    assert await error("made") == (409, "pool_busy", "pool_id")
    proxy.engine.go()


async def test_without_an_engine_it_is_503_and_without_verbs_501(proxy: Rig) -> None:
    """Away: try again; an engine that has no pools: never."""
    await proxy.server.crash()
    await proxy.until_unlinked()
    assert (await proxy.api.post("/polykv/pools/1/verify")).status_code == 503
    proxy.runtime.hub.absent = "no verbs"
    assert (await proxy.api.post("/polykv/pools/1/verify")).status_code == 501


async def test_it_wants_the_admin_key(tmp_path: Path) -> None:
    """The API key opens pools, not their checks."""
    async with rig(tmp_path, keys=Keys(frozenset({"k"}), "boss")) as proxy:
        user, boss = {"authorization": "Bearer k"}, {"authorization": "Bearer boss"}
        assert (await proxy.api.post("/polykv/pools", json={"tokens": BASE}, headers=user)).status_code == 201
        assert (await proxy.api.post("/polykv/pools/1/verify", headers=user)).status_code == 403
        assert (await proxy.api.post("/polykv/pools/1/verify", headers=boss)).json()["verdict"] == "ok"
