"""The no-progress limit (F003): requests of an engine that stands still end with an error; nobody else ever does."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from polykv_proxy.api.relay import Relay
from polykv_proxy.engine.status import EngineState
from polykv_proxy.engine.supervisor import Supervisor, SupervisorLimits
from polykv_proxy.ports import EngineAddress
from polykv_proxy.runtime.progress import Evidence, ProgressWatch
from tests.fakes import fake_engine_process
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.fakes.proxy_process import Served
from tests.fakes.relay_rig import RelayRig, request
from tests.fakes.stub_engine import SSE_HEAD, Do, Stub
from tests.integration.rig import Rig, relayed, rig, served

LIMIT_S = 10
ASK = {"prompt": "one two three four", "n_predict": 2}
GUARD_S = 60


class Whole:
    """A rig with its relay and its watch; time passes only in `passes`."""

    def __init__(self, proxy: Rig, relay: Relay, client: httpx.AsyncClient) -> None:
        self.proxy, self.relay, self.client = proxy, relay, client
        self.doubts: list[str] = []
        self.watch = ProgressWatch(proxy.runtime.hub, LIMIT_S, relay.owed, self._doubt)

    async def _doubt(self, reason: str) -> None:
        self.doubts.append(reason)

    async def passes(self, seconds: int, each: Callable[[], object] = lambda: None) -> None:
        """Second by second; the engine's answer is waited for."""
        for _ in range(seconds):
            self.proxy.clock.now += 1
            each()
            self.watch.tick()
            if self.watch._looking is not None:
                await self.watch._looking

    def asks(self, path: str = "/completion", **fields: object) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.client.post(path, json={**ASK, **fields}))

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(GUARD_S):
            while not holds():
                await asyncio.sleep(0.005)

    async def owed(self, n: int) -> None:
        """Until this many requests are with the engine and its first slot works."""
        await self.until(lambda: len(self.relay.owed()) == n and self.proxy.engine.slots[0].state != "idle")


@asynccontextmanager
async def whole(folder: Path, engine: FakeEngine | None = None) -> AsyncIterator[Whole]:
    async with rig(folder, engine) as proxy, relayed(proxy) as (relay, client):
        yield Whole(proxy, relay, client)


async def test_a_silent_stream_ends_with_one_error_event_and_gives_everything_back(tmp_path: Path) -> None:
    """Headers, then silence for ever: one error event after the limit and not before; pool and session are as they were."""
    async with whole(tmp_path) as all_:
        proxy = all_.proxy
        await proxy.pool(prompt="one two three", name="agents")
        assert (await all_.asks(session_id="s", pool_id="agents")).status_code == 200
        await proxy.settle()
        before = (await proxy.api.get("/polykv/sessions/s")).json()
        proxy.engine.hold()
        asked = all_.asks(session_id="s", pool_id="agents", stream=True)
        await all_.owed(1)
        await all_.passes(LIMIT_S)
        assert not asked.done()
        assert (await proxy.api.get("/polykv/pools/agents")).json()["n_running"] == 1
        await all_.passes(1)
        got = await asked
        assert got.status_code == 200
        events = [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: ")]
        assert [event["error"]["code"] for event in events] == ["engine_no_progress"]
        await proxy.settle()
        after = (await proxy.api.get("/polykv/sessions/s")).json()
        assert (after["state"], after["n_streams"]) == (before["state"], before["n_streams"]) == ("idle", 0)
        assert (await proxy.api.get("/polykv/pools/agents")).json()["n_running"] == 0
        assert len(proxy.runtime.hub.ledger.books) == 0
        assert all(slot.state == "idle" for slot in proxy.engine.slots)
        proxy.engine.go()
        assert (await all_.asks(session_id="s", pool_id="agents")).status_code == 200


async def test_before_the_head_it_is_a_504(tmp_path: Path) -> None:
    """OpenAI-shaped, with Retry-After; the watch counts it, says what it saw, and has the engine doubted."""
    async with whole(tmp_path) as all_:
        all_.proxy.engine.hold()
        asked = all_.asks()
        await all_.owed(1)
        await all_.passes(LIMIT_S + 1)
        got = await asked
        assert (got.status_code, got.headers["retry-after"]) == (504, "5")
        error = got.json()["error"]
        assert (error["code"], error["type"], error["param"]) == ("engine_no_progress", "timeout_error", None)
        assert "--no-progress-s" in error["message"]
        await all_.until(lambda: all_.doubts)
        facts = all_.watch.facts()
        assert (facts["evidence"], facts["n_ended"], facts["last_reason"]) == ("state", 1, all_.doubts[0])


async def test_a_long_silent_prefill_is_progress(tmp_path: Path) -> None:
    """While `update` moves, a stream may be silent and another request queued behind it for as long as it takes."""
    async with whole(tmp_path, FakeEngine(n_slots=1)) as all_:
        engine = all_.proxy.engine
        engine.hold()
        asked = [all_.asks(stream=True)]
        await all_.owed(1)
        asked.append(all_.asks())
        await all_.owed(2)
        await all_.passes(LIMIT_S * 10, engine.publish)
        assert not any(task.done() for task in asked)
        engine.go()
        assert [got.status_code for got in await asyncio.gather(*asked)] == [200, 200]
        assert all_.watch.n_ended == 0


async def test_a_request_that_no_slot_has_is_not_kept_alive_by_questions(tmp_path: Path) -> None:
    """Of an idle engine `update` moves with every question somebody asks; that is not progress."""
    async with whole(tmp_path) as all_:
        all_.proxy.engine.hold()
        asked = all_.asks()
        await all_.owed(1)
        all_.proxy.engine.slots[0].state = "idle"
        await all_.passes(LIMIT_S + 1, all_.proxy.engine.publish)
        assert (await asked).status_code == 504


async def test_an_engine_that_does_not_say_how_far_it_is_stands_still(tmp_path: Path) -> None:
    """`state` fails time after time: after the limit the request is ended."""
    async with whole(tmp_path) as all_:
        all_.proxy.engine.hold()
        asked = all_.asks()
        await all_.owed(1)
        fault = EngineFaultError(500, "server_error", "stuck")
        await all_.passes(LIMIT_S + 1, lambda: all_.proxy.engine.fail_next("state", fault))
        assert (await asked).status_code == 504


async def test_a_request_that_waits_for_its_pool_is_judged_too(tmp_path: Path) -> None:
    """The rebuild of a lost pool stands still: the request for it ends, and the rebuild with it."""
    async with whole(tmp_path) as all_:
        proxy = all_.proxy
        await proxy.pool(prompt="one two three", name="agents")
        await proxy.server.crash()
        await proxy.server.restart()
        await proxy.until_linked(proxy.engine.boot_id)
        proxy.engine.hold()
        asked = all_.asks(pool_id="agents")
        await all_.until(all_.relay.owed)
        await all_.passes(LIMIT_S + 1)
        assert (await asked).status_code == 504
        assert len(proxy.runtime.hub.ledger.books) == 0
        proxy.engine.go()
        assert (await all_.asks(pool_id="agents")).json()["opencoti"]["miss"] is None


async def test_a_stop_of_our_own_is_nobody_else_s(tmp_path: Path) -> None:
    """When the watch itself did not run for a while, the limit begins anew."""
    async with whole(tmp_path) as all_:
        all_.proxy.engine.hold()
        asked = all_.asks()
        await all_.owed(1)
        await all_.passes(2)
        all_.proxy.clock.now += 1000
        await all_.passes(LIMIT_S - 1)
        assert not asked.done()
        await all_.passes(2)
        assert (await asked).status_code == 504


def slots(task: int, processed: int, decoded: int) -> list[dict]:
    """A stock engine's `/slots`."""
    counters = {"n_prompt_tokens_processed": processed, "next_token": [{"n_decoded": decoded, "n_remain": 1}]}
    return [{"id": 0, "is_processing": True, "id_task": task, **counters}, {"id": 1, "is_processing": False}]


async def test_a_stock_engine_is_judged_by_its_slots(tmp_path: Path) -> None:
    """Any counter of a slot is progress, all of them standing still is none."""
    engine = FakeEngine()
    engine.has_verbs = False
    async with whole(tmp_path, engine) as all_:
        engine.hold()
        asked = all_.asks()
        await all_.owed(1)
        for page in (slots(1, 0, 0), slots(1, 64, 0), slots(1, 64, 1), slots(2, 64, 1)):
            all_.proxy.server.pages["/slots"] = (200, "application/json", json.dumps(page).encode())
            await all_.passes(LIMIT_S - 1)
        assert all_.watch.evidence is Evidence.SLOTS
        assert not asked.done()
        await all_.passes(2)
        assert (await asked).status_code == 504


PAGES = {"none": None, "without counters": [{"id": 0, "is_processing": True}], "of another form": {"slots": 1}}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
async def test_without_any_evidence_nobody_is_ended(tmp_path: Path, page: object, caplog: pytest.LogCaptureFixture) -> None:
    """A stock engine whose `/slots` is off, or says too little, is only asked whether it answers; that is said once."""
    engine = FakeEngine()
    engine.has_verbs = False
    async with whole(tmp_path, engine) as all_:
        all_.proxy.server.pages["/slots"] = (200, "application/json", json.dumps(page).encode())
        engine.hold()
        asked = all_.asks()
        await all_.owed(1)
        await all_.passes(LIMIT_S * 3)
        assert not asked.done()
        assert (all_.watch.facts()["evidence"], bool(all_.watch.facts()["reason"])) == ("none", True)
        assert len([record for record in caplog.records if "no-progress limit" in record.message]) == 1
        engine.go()
        assert (await asked).status_code == 200


async def test_an_idle_proxy_asks_nothing(tmp_path: Path) -> None:
    """While nobody waits, the engine's state is not read for the limit's sake."""
    async with whole(tmp_path) as all_:
        n = len(all_.proxy.server.calls)
        await all_.passes(100)
        assert len(all_.proxy.server.calls) == n


def test_the_engine_owes_nothing_to_a_client_that_does_not_read() -> None:
    """A full reply waits for its client, other routes are never judged, a silent reply is owed."""
    scripts = {b"/v1/completions": [SSE_HEAD, Do.FLOOD], b"/v1/chat/completions": [SSE_HEAD, Do.HANG], b"/v1/embeddings": [Do.HANG]}
    with Stub(lambda seen: scripts[seen.target]) as stub, RelayRig(EngineAddress(port=stub.port)) as rig_:

        def paused() -> bool:
            return all(exchange.client.flow.write_paused for exchange in rig_.relay.running)

        with rig_.connect() as slow, rig_.connect() as other, rig_.connect() as silent:
            slow.send(request(b"POST", b"/v1/completions", b"{}"))
            stub.wait_requests(1)
            while not rig_.on_loop(lambda: bool(rig_.relay.running) and paused()):
                pass
            other.send(request(b"POST", b"/v1/embeddings", b"{}"))
            stub.wait_requests(2)
            assert rig_.on_loop(rig_.relay.owed) == []
            silent.send(request(b"POST", b"/v1/chat/completions", b"{}"))
            stub.wait_requests(3)
            assert [exchange.target for exchange in rig_.on_loop(rig_.relay.owed)] == [b"/v1/chat/completions"]


@pytest.mark.parametrize("limit", [None, "1"])
async def test_it_is_off_unless_asked_for(tmp_path: Path, limit: str | None) -> None:
    """The whole proxy: with the option the silent request ends and health says so; without it there is no watch at all."""
    async with served(FakeEngine(), tmp_path) as server:
        options = ["--no-progress-s", limit] if limit else []
        proxy = await asyncio.to_thread(Served.before, server.path, server.engine.key, tmp_path, *options)
        with proxy:
            async with httpx.AsyncClient(base_url=proxy.url, timeout=GUARD_S, trust_env=False) as client:
                if limit is None:
                    assert proxy.health["no_progress"] is None
                else:
                    server.engine.hold()
                    assert (await client.post("/completion", json=ASK)).status_code == 504
                    server.engine.go()
                    facts = (await client.get("/polykv/health")).json()["no_progress"]
                    assert (facts["limit_s"], facts["evidence"], facts["n_ended"], facts["still_s"]) == (1.0, "state", 1, None)
                assert (await client.post("/completion", json=ASK)).status_code == 200
            assert await asyncio.to_thread(proxy.stop) == 0
        assert ("engine has shown no progress" in proxy.said) is (limit is not None)


async def test_a_restart_for_cause_ends_an_engine_that_ignores_it(tmp_path: Path) -> None:
    """TERM, then KILL; the cause is shown until the next process is there."""
    path = tmp_path / "e.sock"
    argv = [sys.executable, fake_engine_process.__file__, "--host", str(path)]
    env = {"FAKE_MODE": "stubborn"}
    supervisor = Supervisor(argv, env, EngineAddress(uds=str(path)), limits=SupervisorLimits(stop_grace_s=0.1, backoff_first_s=0.0))
    seen: list[tuple[EngineState, str | None]] = []
    supervisor.observers.append(lambda status: seen.append((status.state, status.reason)))
    supervisor.start()
    await asyncio.wait_for(supervisor.first_boot(), GUARD_S)
    supervisor.restart("it stood still")
    async with asyncio.timeout(GUARD_S):
        while not (supervisor.status.state is EngineState.READY and supervisor.status.restarts == 1):
            await asyncio.sleep(0.01)
    assert (EngineState.FAILED, "it stood still") in seen
    assert supervisor.status.reason is None
    await supervisor.stop()
