"""Guards: a shared cell is never shifted, a full cache stops one request only, a slot never leaks its former tokens."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Engine, Reply, request_body
from tests.engine.judge import assert_equal, assert_same_ids, noise_floor
from tests.models import tiny_model

pytestmark = pytest.mark.engine


def tokens(n: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(300, 40000) for i in range(n)]


class TestContextShift:
    """F005: with context shift on, slots that hold shared cells stop at the limit; others still shift."""

    ARGS = ("-c", 768, "-np", 2, "-t", 1, "--context-shift", "--kv-unified-per-slot", 256, "--cache-ram", 0)

    def test_attached_session_stops_at_the_limit_and_the_pool_stays(self, engine_path: Path) -> None:
        """A ends truncated, B's answer and a third one are the same before and after, and no shift was logged."""
        with Engine(engine_path, tiny_model("full"), self.ARGS) as engine:
            assert "context shift is on" in engine.log()
            pool = tokens(100, 1)
            seq = engine.materialise(pool)
            prompt_b = [*pool, 21, 22, 23]
            before = engine.attached(prompt_b, seq, 8, session=2)
            a = engine.attached([*pool, 11, 12], seq, -1, session=1, ignore_eos=True, n_probs=0)
            assert a.body["truncated"] is True
            assert a.body["stop_type"] == "limit"
            assert a.n_cached + a.n_computed + len(a.tokens) in range(250, 258)
            floor = noise_floor(engine)
            assert_equal(engine.attached(prompt_b, seq, 8), before, floor)
            assert_equal(engine.attached(prompt_b, seq, 8), engine.fresh(prompt_b, 8), floor)
            assert engine.seq_tokens(seq) == pool
            assert "slot context shift" not in engine.log()

    def test_plain_slots_still_shift(self, engine_path: Path) -> None:
        """A request that shares nothing goes past its context by shifting, and its KV cannot become a pool."""
        with Engine(engine_path, tiny_model("full"), self.ARGS) as engine:
            plain = engine.completion(tokens(100, 2), 300, engine.attach_headers(session=5), ignore_eos=True, n_probs=0)
            assert len(plain.tokens) == 300
            assert "slot context shift" in engine.log()
            assert engine.snapshot(5)["failed"]["type"] == "session_not_resident"

    def test_snapshot_in_mid_generation_stops_the_shift(self, engine_path: Path) -> None:
        """When a snapshot makes the cells of a running request shared, that request stops instead of shifting."""
        with Engine(engine_path, tiny_model("full"), self.ARGS) as engine:
            replies: list[Reply] = []

            def run() -> None:
                replies.append(engine.completion(tokens(60, 3), -1, engine.attach_headers(session=6), ignore_eos=True, n_probs=0))

            thread = threading.Thread(target=run)
            thread.start()
            while not any(slot["session"] == 6 and slot["n_tokens"] > 62 for slot in engine.state()["slots"]):
                assert thread.is_alive()
            shot = engine.snapshot(6)
            thread.join()
            assert "seq" in shot, shot
            assert replies[0].body["truncated"] is True
            assert engine.seq_tokens(shot["seq"]) == shot["tokens"]
            prompt = [*shot["tokens"], 31, 32]
            assert_equal(engine.attached(prompt, shot["seq"]), engine.fresh(prompt), noise_floor(engine))


def test_chunk_reuse_moves_private_cells_only(engine_path: Path) -> None:
    """F003: with chunk reuse on, requests end, an attached pool keeps its positions, and moved KV cannot become a pool."""
    with Engine(
        engine_path, tiny_model("full"), ["-c", 2048, "-np", 3, "-t", 1, "--cache-reuse", 8, "-kvu", "--cache-ram", 0]
    ) as engine:
        pool, tail = tokens(60, 4), tokens(40, 5)
        seq = engine.materialise(pool)
        floor = noise_floor(engine)
        before = engine.attached([*pool, 9], seq, 6)
        engine.attached([*pool, *tokens(12, 6), *tail], seq, session=1)
        moved = engine.attached([*pool, *tail, 3, 4], seq, session=1)  # the tail is found 12 tokens further on
        assert moved.n_shared == 60
        assert moved.n_computed < 40
        assert engine.snapshot(1)["failed"]["type"] == "session_not_resident"
        assert_equal(engine.attached([*pool, 9], seq, 6), before, floor)
        assert engine.seq_tokens(seq) == pool
        with ThreadPoolExecutor(3) as threads:
            alike = [[*tokens(40, 7), *tokens(60, 8 + i)] for i in range(5)]
            replies = list(threads.map(lambda prompt: engine.completion(prompt, 4), [*alike, *alike]))
        assert all(reply.status == 200 and len(reply.tokens) == 4 for reply in replies)


def run_all(engine: Engine, prompts: list[list[int]], seq: str, n: int, **body: Any) -> list[Reply]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        jobs = [threads.submit(engine.attached, prompt, seq, n, session=i + 1, **body) for i, prompt in enumerate(prompts)]
        return [job.result() for job in jobs]


class TestFullCache:
    """A full cache drops drafts, purges idle slots, never a pool, then stops one victim; the others go on as if alone."""

    @pytest.mark.parametrize("speculation", ["none", "draft-simple", "ngram-simple"])
    def test_one_victim_and_the_others_equal_a_solo_run(self, engine_path: Path, speculation: str) -> None:
        """Three requests that cannot all fit: exactly one ends truncated, the answers of the others are those of a solo run."""
        args: list[str | int | Path] = ["-c", 512, "-np", 3, "-t", 1, "-kvu", "--cache-ram", 0, "--spec-type", speculation]
        if speculation == "draft-simple":
            args += ["--spec-draft-model", tiny_model("draft"), "--spec-draft-n-max", 8]
        if speculation == "ngram-simple":
            args += ["--spec-ngram-simple-size-n", 1, "--spec-ngram-simple-size-m", 8]
        model = tiny_model("full-f32")
        with Engine(engine_path, model, args) as engine, Engine(engine_path, model, ["-c", 2048, "-np", 1, "-t", 1]) as clean:
            pool = tokens(100, 11)
            seq = engine.materialise(pool)
            prompts = [[*pool, *tokens(4 + 20 * i, 12 + i)] for i in range(3)]
            replies = run_all(engine, prompts, seq, 150, ignore_eos=True, n_probs=0)
            assert [reply.status for reply in replies] == [200, 200, 200]
            stopped = [reply for reply in replies if reply.body["truncated"]]
            assert len(stopped) == 1, [(r.body["truncated"], len(r.tokens)) for r in replies]
            assert stopped[0].body["stop_type"] == "limit"
            assert engine.seq_tokens(seq) == pool
            assert ("decoding without a draft" in engine.log()) or speculation != "draft-simple"
            for prompt, reply in zip(prompts, replies, strict=True):
                assert len(reply.tokens) == 150 or reply in stopped
                probe = clean.fresh(prompt, len(reply.tokens), ignore_eos=True)
                assert_same_ids(reply.tokens, probe, noise_floor(clean))

    def test_idle_sessions_give_way_before_anybody_is_stopped(self, engine_path: Path) -> None:
        """Idle private cells are purged first: nobody is truncated, the pool stays."""
        with Engine(engine_path, tiny_model("full"), ["-c", 512, "-np", 3, "-t", 1, "-kvu", "--cache-ram", 0]) as engine:
            pool = tokens(100, 21)
            seq = engine.materialise(pool)
            engine.attached([*pool, *tokens(150, 22)], seq, 4, session=1)
            big = engine.attached([*pool, *tokens(120, 23)], seq, 180, session=2, ignore_eos=True, n_probs=0)
            assert big.body["truncated"] is False
            assert len(big.tokens) == 180
            state = engine.state()
            assert [entry["n_tokens"] for entry in state["seqs"]] == [100]
            assert all(slot["session"] != 1 for slot in state["slots"])

    def test_victim_before_its_first_token_gets_the_context_error(self, engine_path: Path) -> None:
        """A prompt that does not fit beside a running request is refused with the context-size error, not an empty answer."""
        with Engine(engine_path, tiny_model("full"), ["-c", 512, "-np", 2, "-t", 1, "-kvu", "--cache-ram", 0]) as engine:
            results: list[Reply] = []
            thread = threading.Thread(
                target=lambda: results.append(engine.completion(tokens(40, 31), 150, ignore_eos=True, n_probs=0))
            )
            thread.start()
            while not any(slot["state"] == "generating" for slot in engine.state()["slots"]):
                assert thread.is_alive()
            late = engine.completion(tokens(480, 32), 4)
            thread.join()
            assert late.status == 400
            assert late.body["error"]["type"] == "exceed_context_size_error"
            assert len(results[0].tokens) == 150

    def test_variants_of_one_prompt_beside_a_full_cache_end(self, engine_path: Path) -> None:
        """Several completions of a prompt that does not fit beside a running one all end, and no slot stays busy."""
        with Engine(engine_path, tiny_model("full"), ["-c", 768, "-np", 4, "-t", 1, "-kvu", "--cache-ram", 0]) as engine:
            results: list[Reply] = []
            prompt = tokens(410, 33)
            thread = threading.Thread(target=lambda: results.append(engine.completion(prompt, 150, ignore_eos=True, n_probs=0)))
            thread.start()
            while not any(slot["state"] == "generating" for slot in engine.state()["slots"]):
                assert thread.is_alive()
            late = engine.http.post("/completion", json=request_body(tokens(370, 34), 3, n_cmpl=2, n_probs=0, ignore_eos=True))
            thread.join()
            assert late.status_code in {200, 400}, late.text
            assert results[0].status in {200, 400}, results[0].body
            assert 200 in {late.status_code, results[0].status}
            engine.idle_state()

    def test_lone_request_keeps_the_stock_error(self, engine_path: Path) -> None:
        """One request that cannot fit beside the pools gets the engine's own error; the pool and the engine live on."""
        with Engine(engine_path, tiny_model("full"), ["-c", 512, "-np", 1, "-t", 1, "-kvu", "--cache-ram", 0]) as engine:
            seq = engine.materialise(tokens(300, 41))
            reply = engine.completion(tokens(400, 42), 4)
            assert reply.status == 500
            assert "Context size has been exceeded" in reply.body["error"]["message"]
            assert engine.attached([*tokens(300, 41), 5], seq, 2).n_shared == 300

    def test_window_cache_is_not_reported_full_by_two_long_pools(self, engine_path: Path) -> None:
        """Two long pools with attached sessions on a sliding-window model: window cells are trimmed, so nobody is stopped."""
        with Engine(engine_path, tiny_model("swa"), ["-c", 4096, "-np", 2, "-t", 1, "-ub", 128, "--cache-ram", 0]) as engine:
            for i in range(2):
                pool = tokens(1200, 51 + i)
                seq = engine.materialise(pool)
                reply = engine.attached([*pool, 5, 6], seq, 40, session=i + 1, ignore_eos=True, n_probs=0)
                assert reply.n_shared == 1200
                assert len(reply.tokens) == 40
            assert engine.completion(tokens(500, 53), 8, n_probs=0).status == 200
            assert "full" not in engine.log().lower().replace("--swa-full", "").replace("full-", "")


class TestReuse:
    """A slot that is used again never leaks the former conversation's tokens or state."""

    @pytest.mark.parametrize("kind", ["recurrent", "hybrid", "swa"])
    def test_stale_checkpoint_is_not_restored(self, engine_path: Path, kind: str) -> None:
        """A context checkpoint of an older prompt that ends at the first differing token is dropped (stock restores it)."""
        with Engine(engine_path, tiny_model(kind), ["-c", 1024, "-np", 1, "-t", 1, "--cache-ram", 0]) as engine:
            prompt = [20, 1000, 5, 6, 7]
            reference = engine.fresh(prompt)
            engine.completion([10, 11, 12, 13, 14])
            engine.completion([20, 21, 22, 23, 24, 25, 26])
            assert_equal(engine.completion(prompt), reference, 0.0)

    @pytest.mark.parametrize("cache_ram", [0, 64])
    @pytest.mark.parametrize("kind", ["full", "swa", "hybrid"])
    def test_unrelated_request_equals_the_baseline(self, engine_path: Path, kind: str, cache_ram: int) -> None:
        """F001: after other conversations, attached or not, released or not, B's answer and cached count are its own."""
        args = ["-c", 2048, "-np", 2, "-t", 1, "-kvu", "--cache-ram", cache_ram]
        with (
            Engine(engine_path, tiny_model(kind), args) as engine,
            Engine(engine_path, tiny_model(kind), args, max_pools=0) as clean,
        ):
            floor = noise_floor(clean)
            for i in range(20):
                secret, other = tokens(120, 100 + i), tokens(60, 200 + i)
                seq = engine.materialise(secret)
                engine.attached([*secret, 7], seq, session=1000 + i)
                if i % 2:
                    engine.free(seq)
                if i % 3:
                    engine.end_session(1000 + i)
                answer = engine.completion(other)
                assert answer.n_cached == 0
                assert_equal(answer, clean.fresh(other), floor)
                engine.free(seq)

    def test_slot_actions_keep_the_share_right(self, engine_path: Path, tmp_path: Path) -> None:
        """Save, erase, restore of a slot with shared cells: counts return to zero, the pool stays, restored KV is no pool."""
        args = ["-c", 1024, "-np", 2, "-t", 1, "--slot-save-path", tmp_path, "--cache-ram", 0]
        with Engine(engine_path, tiny_model("full"), args) as engine:
            pool = tokens(50, 61)
            seq = engine.materialise(pool)
            reply = engine.attached([*pool, 1, 2], seq, session=1)
            slot = int(reply.headers["x-polykv-slot"])
            for action in ("save", "erase", "restore"):
                done = engine.http.post(f"/slots/{slot}?action={action}", json={"filename": "s.bin"})
                assert done.status_code == 200, done.text
                while engine.state()["slots"][slot]["n_shared"] != (50 if action == "save" else 0):
                    assert engine.process.poll() is None  # stock actions reply before the next state is published
            assert engine.snapshot(1)["failed"]["type"] == "session_not_resident"
            again = engine.attached([*pool, 1, 2, *reply.tokens, 3], seq, session=1)
            assert_equal(again, engine.fresh([*pool, 1, 2, *reply.tokens, 3]), noise_floor(engine))
            assert engine.seq_tokens(seq) == pool

    def test_several_completions_of_one_prompt(self, engine_path: Path) -> None:
        """F009: n variants attach once, all arrive; more variants than slots is a clean 400; cancelling frees all."""
        with Engine(engine_path, tiny_model("full"), ["-c", 2048, "-np", 4, "-t", 1, "-kvu", "--cache-ram", 0]) as engine:
            pool = tokens(50, 71)
            seq = engine.materialise(pool)
            with ThreadPoolExecutor(5) as threads:
                jobs = [
                    threads.submit(engine.attached, [*pool, 5, 6, i], seq, 4, n_cmpl=3, n_probs=0, id_slot=slot)
                    for i, slot in enumerate([0, 3, 2, 1, 0])
                ]
                answers = [job.result() for job in jobs]
            for reply in answers:
                assert reply.status == 200, reply.body
                assert len(reply.body) == 3  # type: ignore[arg-type]
            assert engine.completion([1, 2, 3], 4, n_cmpl=5).status == 400
            body = {"prompt": [*pool, 9], "n_cmpl": 3, "n_predict": 1000, "ignore_eos": True, "stream": True}
            with engine.lines("POST", "/completion", body, engine.attach_headers(seq)) as lines:
                next(lines)
            engine.idle_state()
            assert engine.attached([*pool, 8], seq).n_shared == 50

    def test_session_finds_its_own_cells_after_several_completions(self, engine_path: Path) -> None:
        """The slots of the further variants do not count as the session's: its next turn goes on in the first one."""
        with Engine(engine_path, tiny_model("full"), ["-c", 2048, "-np", 4, "-t", 1, "-kvu", "--cache-ram", 0]) as engine:
            prompt = tokens(60, 91)
            reply = engine.http.post(
                "/completion", json=request_body(prompt, 4, n_cmpl=3), headers=engine.attach_headers(session=9)
            )
            assert reply.status_code == 200
            assert [slot["session"] for slot in engine.state()["slots"]].count(9) == 1
            assert engine.completion([*prompt, 1, 2], 2, engine.attach_headers(session=9)).n_computed <= 3


def test_cancelled_materialisation_leaves_nothing(engine_path: Path) -> None:
    """A materialisation whose caller leaves, or that is deleted while it runs, gives back its id, its slot and its cells."""
    with Engine(engine_path, tiny_model("full"), ["-c", 16384, "-np", 2, "-t", 1, "-b", 32, "-ub", 32, "--cache-ram", 0]) as engine:
        for how in ("leave", "delete"):
            with engine.lines("POST", "/_polykv/v1/seqs", {"tokens": tokens(7000, 81)}) as lines:
                data = (json.loads(line[6:]) for line in lines if line.startswith("data: "))
                seq = next(data)["seq"]
                next(data)
                if how == "delete":
                    assert engine.free(seq)["freed"] is True
                    assert list(data)[-1]["type"] == "invalid_request_error"
            state = engine.idle_state()
            assert state["seqs"] == []
            assert state["cells"]["used"] == 0
        seqs = [engine.materialise(tokens(10, 82 + i)) for i in range(4)]
        name, error = engine.post_seqs({"tokens": tokens(10, 90)})
        assert (name, error["status"], error["type"]) == ("http", 429, "no_seq_ids")
        for seq in seqs:
            engine.free(seq)
