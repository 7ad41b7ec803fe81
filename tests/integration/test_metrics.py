"""`/metrics` over the fake engine, in every state of it."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families as read_text

from polykv_proxy.api.context import Keys
from polykv_proxy.core.pools import Residency
from polykv_proxy.engine.status import EngineState
from tests.fakes.fake_engine import FakeEngine
from tests.integration.metrics_rig import ENGINE_PAGE, GIVEN, OURS, Scraped, scraped

NAME = '{model_name="toy.gguf"}'


async def test_both_pages_are_one(tmp_path: Path) -> None:
    """The engine's lines as they came, then ours; text, OpenMetrics, gzip and HEAD; the engine's word since when it counts."""
    async with scraped(tmp_path) as rig:
        rig.proxy.server.pages["/metrics"] = GIVEN
        async with asyncio.timeout(20):
            while "llamacpp:" not in (text := await rig.page()):
                await asyncio.sleep(0.005)
        assert text.startswith(ENGINE_PAGE.decode())
        assert OURS in text
        reply = await rig.client.get("/metrics")
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert reply.headers["process-start-time-unix"] == "1700000000"
        head = await rig.client.head("/metrics")
        assert (head.status_code, head.content) == (200, b"")
        async with rig.client.stream("GET", "/metrics", headers={"accept-encoding": "gzip"}) as packed:
            raw = b"".join([part async for part in packed.aiter_raw()])
        assert packed.headers["content-encoding"] == "gzip"
        assert OURS.encode() in gzip.decompress(raw)
        plain = await rig.client.get("/metrics", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers


async def test_other_methods_are_the_engine_s(tmp_path: Path) -> None:
    """Only reading is extended."""
    async with scraped(tmp_path) as rig:
        before = len(rig.proxy.server.calls)
        await rig.client.post("/metrics", content=b"")
        assert ("POST", "/metrics") in rig.proxy.server.calls[before:]


async def test_the_page_is_on_the_engine_s_path(tmp_path: Path) -> None:
    """With --api-prefix it is below that, and nowhere else."""
    async with scraped(tmp_path, prefix="/llm") as rig:
        assert OURS in (await rig.client.get("/llm/metrics")).text
        assert OURS not in (await rig.client.get("/metrics")).text


async def test_each_state_of_the_engine_is_told_and_the_page_stays_sound(tmp_path: Path) -> None:
    """Starting, ready, lost, back: one state is 1, the engine's part is there only while it is ready."""
    async with scraped(tmp_path) as rig:
        rig.proxy.server.pages["/metrics"] = GIVEN
        await rig.until("llamacpp:requests_processing", 2.0)
        for state in (EngineState.FAILED, EngineState.STARTING, EngineState.STOPPING):
            rig.engine(state)
            found = await rig.samples()
            states = {name: value for name, value in found.items() if name.startswith("polykv_engine_state")}
            assert [name for name, value in states.items() if value] == [f'polykv_engine_state{{state="{state.value}"}}']
            assert "llamacpp:requests_processing" not in found
        await rig.proxy.server.crash()
        await rig.proxy.until_unlinked()
        found = await rig.samples()
        assert found["polykv_engine_linked"] == 0
        assert f"vllm:kv_cache_usage_perc{NAME}" not in found
        await rig.proxy.server.restart()
        rig.engine(EngineState.READY)
        await rig.proxy.until_linked(rig.proxy.engine.boot_id)
        found = await rig.until("llamacpp:requests_processing", 2.0)
        assert found["polykv_engine_linked"] == 1
        assert found[f"vllm:kv_cache_usage_perc{NAME}"] == 0


async def test_a_stock_engine_is_a_backend_too(tmp_path: Path) -> None:
    """Without our protocol requests and tokens are those of the engine's page, and of its cache nothing is said."""
    engine = FakeEngine()
    engine.has_verbs = False
    async with scraped(tmp_path, engine) as rig:
        rig.proxy.server.pages["/metrics"] = GIVEN
        found = await rig.until(f"vllm:num_requests_running{NAME}", 2.0)
        assert found[f"vllm:num_requests_waiting{NAME}"] == 3
        assert found[f"vllm:prompt_tokens_total{NAME}"] == 50
        assert found[f"vllm:prefix_cache_hits_total{NAME}"] == 10
        assert found[f"vllm:generation_tokens_total{NAME}"] == 7
        assert found["polykv_engine_linked"] == 0
        assert not any(name.startswith(("polykv_kv_", "vllm:kv_", "vllm:cache_config")) for name in found)


async def test_the_key_is_the_engine_s(tmp_path: Path) -> None:
    """Without it the engine's own 401; with it, either way it takes them, the page."""
    async with scraped(tmp_path, keys=Keys(frozenset({"k"}))) as rig:
        refused = await rig.client.get("/metrics")
        assert refused.status_code == 401
        assert refused.json() == {"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}}
        for headers in ({"authorization": "Bearer k"}, {"x-api-key": "k"}):
            assert (await rig.client.get("/metrics", headers=headers)).status_code == 200


async def test_counters_say_what_clients_saw(tmp_path: Path) -> None:
    """Tokens in and out, hits and lookups, outcomes and turns add up to what was asked for."""
    async with scraped(tmp_path) as rig:
        pool = await rig.proxy.pool(prompt="one two three four", name="p")
        replies = [
            await rig.ask("one two three four five", n_predict=3, pool_id="p"),
            await rig.ask("six seven", n_predict=2),
            await rig.ask("one two three four nine", n_predict=1, pool_id="p", session_id="s"),
        ]
        await rig.client.post("/completion", content=b"{")
        found = await rig.until('polykv_turns_total{reason="limit"}', 3.0)
        found = await rig.until(f"vllm:generation_tokens_total{NAME}", 6.0)
        timings = [reply["timings"] for reply in replies]
        assert found[f"vllm:prompt_tokens_total{NAME}"] == sum(each["prompt_n"] + each["cache_n"] for each in timings)
        assert found[f"vllm:prefix_cache_hits_total{NAME}"] == sum(each["cache_n"] for each in timings)
        shared = sum(reply["opencoti"]["cached_prefix_tokens"] for reply in replies if "opencoti" in reply)
        assert found["polykv_saved_prompt_tokens_total"] == shared == 2 * pool["prefix_len"]
        label = f'{{pool="{pool["pool_id"]}"}}'
        assert found[f"opencoti_polykv:queries_total{label}"] == found[f"opencoti_polykv:prefix_cache_hits_total{label}"] == 2
        assert found[f"polykv_pool_saved_prompt_tokens_total{label}"] == shared
        assert found['opencoti_polykv:queries_total{pool="none"}'] == 1
        assert found['polykv_requests_total{outcome="complete",route="completions"}'] == 3
        assert found['polykv_requests_total{outcome="engine_error",route="completions"}'] == 1
        assert found["polykv_plan_seconds_count"] == 2
        assert found["polykv_kv_owned_bytes"] == found["polykv_kv_used_bytes"] == rig.proxy.engine.used_cells() * 100
        assert found[f"opencoti_polykv:pool_kv_bytes{label}"] == pool["prefix_len"] * 100
        assert found["polykv_seq_ids_used"] == len(rig.proxy.engine.seqs) == 1


async def test_hits_are_what_was_really_not_computed_and_zeros_have_reasons(tmp_path: Path) -> None:
    """Random prompts hit nothing; one prompt twice hits what the engine says; after an evict the first run saves nothing (F024)."""
    async with scraped(tmp_path, FakeEngine(n_slots=1)) as rig:
        for n in range(20):
            await rig.ask(f"{n}a {n}b {n}c", n_predict=1, cache_prompt=False)
        found = await rig.until('polykv_not_shared_total{reason="no_pool"}', 20.0)
        assert found[f"vllm:prefix_cache_hits_total{NAME}"] == 0
        await rig.proxy.pool(prompt="one two three four", name="p")
        shared = 0
        for _ in range(2):
            reply = await rig.ask("one two three four five", n_predict=1, pool_id="p")
            shared += reply["opencoti"]["cached_prefix_tokens"]
        found = await rig.until("polykv_saved_prompt_tokens_total", shared)
        before = found["polykv_saved_prompt_tokens_total"]
        assert (await rig.proxy.api.post("/polykv/pools/p/evict")).json()["evicted"]
        await rig.ask("one two three four five", n_predict=1, pool_id="p")
        found = await rig.until('polykv_not_shared_total{reason="rebuilt"}', 1.0)
        assert found["polykv_saved_prompt_tokens_total"] == before
        assert found['polykv_pool_rebuilds_total{outcome="made"}'] == 1
        assert found['polykv_pool_evictions_total{cause="asked"}'] == 1
        assert (await rig.proxy.api.post("/polykv/pools/p/verify")).json()["verdict"] == "ok"
        found = await rig.until('polykv_pool_checks_total{verdict="ok"}', 1.0)
        assert found['polykv_pool_checks_total{verdict="mismatch"}'] == 0
        await rig.ask("one two three four five", n_predict=1, pool_id="p", cache_prompt=False)
        found = await rig.until('polykv_not_shared_total{reason="cache_prompt_off"}', 1.0)
        assert found[f"vllm:prefix_cache_hits_total{NAME}"] <= found[f"vllm:prefix_cache_queries_total{NAME}"]


async def test_no_caller_makes_a_series(tmp_path: Path) -> None:
    """Thousands of sessions and pools, paths, models, methods: few series, a small page, nothing left of them (F068)."""
    async with scraped(tmp_path) as rig:
        await rig.ask("hello", n_predict=1)
        ledger = rig.proxy.runtime.hub.ledger
        await rig.until('polykv_turns_total{reason="limit"}', 1.0)
        empty = len(await rig.samples())
        await rig.proxy.pool(prompt="one two", name="p")
        for n in range(5000):
            ledger.sessions.open(f"session-{n}", rig.proxy.clock.now)
        tree = ledger.tree
        plain = tree.named("p")
        assert plain is not None
        made = [replace(plain, pool_id=tree.take_id(), name=f"made-{n}", residency=Residency.EVICTED, seq=None) for n in range(999)]
        for each in made:
            tree.put(each)
        for n in range(200):
            await rig.client.get(f"/no-such-path/{n}")
            await rig.client.post("/completion", json={"prompt": "x", "n_predict": 1, "model": f"model-{n}@nobody-{n}"})
        for n in range(50):
            await rig.client.request(f"ODD{n}", "/slots")
        text = await rig.page()
        assert len(text) < 200_000
        for word in ("session-", "made-", "no-such-path", "model-", "ODD"):
            assert word not in text
        families: dict[str, int] = {}
        for family in read_text(text):
            families[family.name] = len(family.samples)
        assert max(families.values()) <= 103
        for each in made:
            tree.remove(each.pool_id)
        for session in ledger.sessions:
            ledger.end_session(session.session_id, rig.proxy.clock.now)
        await rig.proxy.api.delete("/polykv/pools/p")
        await rig.until('polykv_sessions{state="idle"}', 0.0)
        left = set(await rig.samples())
        assert not any(f'pool="{each.pool_id}"' in name for each in made for name in left)
        assert len(left) <= empty + 2


async def test_scrapes_while_streams_run_are_sound_and_counters_never_fall(tmp_path: Path) -> None:
    """A picker that asks every 50 ms reads whole pages, sees requests run and wait, and no counter goes down."""
    async with scraped(tmp_path, FakeEngine(n_slots=2)) as rig:
        rig.proxy.server.pages["/metrics"] = GIVEN

        async def stream(n: int) -> int:
            body = {"prompt": f"stream {n}", "n_predict": 400, "stream": True}
            async with rig.client.stream("POST", "/completion", json=body) as reply:
                return sum([b"content" in line async for line in reply.aiter_raw()])

        streams = [asyncio.ensure_future(stream(n)) for n in range(6)]
        before: dict[str, float] = {}
        seen: dict[str, set[float]] = {"running": set(), "waiting": set()}
        done: set[asyncio.Future[int]] = set()
        while len(done) < len(streams):
            done, _ = await asyncio.wait(streams, timeout=0.05)
            found = await _scrape(rig)
            assert all(found[name] >= value for name, value in before.items() if "_total" in name)
            for what, values in seen.items():
                values.add(found[f"vllm:num_requests_{what}{NAME}"])
            before = found
        assert max(seen["running"]) == 2
        assert max(seen["waiting"]) >= 3
        found = await rig.until(f"vllm:generation_tokens_total{NAME}", 6 * 400)
        assert found[f"vllm:num_requests_running{NAME}"] == found[f"vllm:num_requests_waiting{NAME}"] == 0


async def _scrape(rig: Scraped) -> dict[str, float]:
    """As it is served, cached or not."""
    text = (await rig.client.get("/metrics")).text
    return {
        sample.name
        + ("" if not sample.labels else "{" + ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items())) + "}"): sample.value
        for family in read_text(text)
        for sample in family.samples
    }


async def test_what_goes_wrong_in_the_proxy_is_counted(tmp_path: Path) -> None:
    """Repeated answers, a journal that cannot be written, gaps of watchers and restarts each move a counter."""
    async with scraped(tmp_path) as rig:
        for _ in range(2):
            await rig.proxy.api.post("/polykv/pools", json={"prompt": "one two", "name": "p"}, headers={"idempotency-key": "k"})
        journal = rig.proxy.runtime.hub.journal
        assert journal._db is not None
        await journal._in_worker(lambda: journal._db.execute("PRAGMA query_only = ON"))
        assert (await rig.proxy.api.post("/polykv/pools/p/pin", json={})).status_code == 507
        rig.proxy.runtime.hub.telemetry.news.skip()
        rig.status = replace(rig.status, restarts=3)
        found = await rig.samples()
        assert found["polykv_idempotent_replays_total"] == 1
        assert found["polykv_journal_errors_total"] == 1
        assert found["polykv_watcher_event_gaps_total"] == 1
        assert found["polykv_engine_restarts_total"] == 3
        await rig.until("polykv_event_loop_lag_seconds_count")
        assert found["polykv_process_resident_memory_bytes"] > 0
