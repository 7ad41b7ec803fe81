"""Attach on each memory class: every prefix length, honest counts, answers equal to a fresh prefill, the engine alive."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.driver import Engine
from tests.engine.judge import assert_equal, noise_floor
from tests.models import tiny_model

pytestmark = pytest.mark.engine

KINDS = ["full", "swa", "recurrent", "hybrid", "hybrid-swa"]
LAYOUTS = {"unified": ("-c", 2048, "-np", 3), "split": ("-c", 6144, "-np", 3, "--no-kv-unified")}


def tokens(n: int, seed: int = 1) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(300, 40000) for i in range(n)]


@pytest.fixture(scope="module", params=[(kind, layout) for layout in LAYOUTS for kind in KINDS], ids="-".join)
def engine(request: pytest.FixtureRequest, engine_path: Path) -> Iterator[Engine]:
    kind, layout = request.param
    with Engine(engine_path, tiny_model(kind), [*LAYOUTS[layout], "-t", 1]) as engine:
        assert engine.hello()["kv"]["unified"] == (layout == "unified" or kind == "recurrent")
        yield engine


@pytest.fixture(scope="module")
def floor(engine: Engine) -> float:
    return noise_floor(engine)


def from_checkpoints(engine: Engine) -> bool:
    return engine.hello()["prefix_sharing"] == "checkpoint"


@pytest.mark.parametrize("length", [1, 2, 31, 100, 200])
def test_every_prefix_length_is_served_honestly(engine: Engine, floor: float, length: int) -> None:
    """For each P in 0..L+1 what is shared is the true common prefix, or nothing with a reason; the answer is a fresh prefill's."""
    pool = tokens(length)
    seq = engine.materialise(pool)
    before = engine.used_cells()
    for p in sorted({0, 1, 2, 3, length // 2, length - 2, length - 1, length, length + 1} & set(range(length + 2))):
        prompt = [*pool[:p], 1000 + p, 5, 6] if p <= length else [*pool, pool[0]]
        reply = engine.attached(prompt, seq)
        true_prefix = min(p, length)
        assert (reply.miss is None) == (reply.n_shared > 0)
        assert reply.n_computed + reply.n_cached == len(prompt)
        if from_checkpoints(engine) and true_prefix < length:
            assert reply.n_shared <= true_prefix
            assert reply.n_cached >= (true_prefix // 64 * 64 if true_prefix < length - 1 else true_prefix)
        else:
            assert reply.n_shared in {0, true_prefix}
            assert reply.n_cached >= true_prefix or true_prefix <= 8
        assert_equal(reply, engine.fresh(prompt), floor)
    assert engine.seq_tokens(seq) == pool
    assert before >= (0 if engine.hello()["model"]["recurrent"] else length)
    assert engine.free(seq)["freed"] is True
    assert engine.free(seq)["freed"] is False


def test_prompt_equal_to_the_pool(engine: Engine, floor: float) -> None:
    """A prompt equal to its pool computes at least one token and reports what was really shared."""
    pool = tokens(100, seed=2)
    seq = engine.materialise(pool)
    reply = engine.attached(pool, seq)
    assert reply.n_shared == 99
    assert reply.n_computed == 1
    assert_equal(reply, engine.fresh(pool), floor)
    engine.free(seq)


def test_an_empty_prompt_is_too_short_to_share(engine: Engine) -> None:
    """Whatever the memory class: it is the prompt that has nothing in common, and the reply says that."""
    seq = engine.materialise(tokens(20, seed=3))
    reply = engine.attached("", seq)
    assert (reply.n_shared, reply.n_computed, reply.miss) == (0, 0, "too_short")
    engine.free(seq)


def test_explicit_shared_length_only_lowers(engine: Engine) -> None:
    """`x-polykv-shared` bounds what is taken; memory that cannot be cut back gives what its nearest checkpoint holds."""
    pool = tokens(90, seed=3)
    seq = engine.materialise(pool)
    reply = engine.attached([*pool, 7, 8], seq, shared=70)
    assert reply.n_shared == (64 if from_checkpoints(engine) else 70)
    engine.free(seq)


def test_fork_at_any_point_equals_a_fresh_prefill(engine: Engine, floor: float) -> None:
    """Children that branch before, at and after checkpoints, and grandchildren of them, answer as fresh prefills do."""
    pool = tokens(200, seed=10)
    root = engine.materialise(pool)
    for at in (30, 64, 100, 199, 200):
        branch = [*pool[:at], *tokens(90, seed=20 + at)]
        name, child = engine.post_seqs({"tokens": branch, "parent_seq": root, "branch_pos": at})
        assert name == "done"
        assert child["n_cached"] <= at
        assert at - child["n_cached"] < (64 if from_checkpoints(engine) else 1)
        shares = engine.hello()["kv"]["unified"] and child["n_cached"]
        assert (child["base"], child["n_shared"]) == ((root, child["n_cached"]) if shares else (None, 0))
        leaf = [*branch[: at + 80], *tokens(20, seed=30 + at)]
        grand = engine.post_seqs({"tokens": leaf, "parent_seq": child["seq"], "branch_pos": at + 80})[1]
        for seq, prefix in ((child["seq"], branch), (grand["seq"], leaf)):
            reply = engine.attached([*prefix, 3, 4], seq)
            assert reply.n_shared == len(prefix)
            assert_equal(reply, engine.fresh([*prefix, 3, 4]), floor)
            engine.free(seq)
    assert_equal(engine.attached([*pool, 3, 4], root), engine.fresh([*pool, 3, 4]), floor)
    engine.free(root)


def test_second_answer_to_one_prompt_takes_the_pool_again(engine: Engine) -> None:
    """A session that goes back behind its own cells computes no more than from the nearest checkpoint of its pool."""
    pool = tokens(150, seed=11)
    seq = engine.materialise(pool)
    for ending in ([1, 2, 3], [4, 5, 6], [1, 9, 9]):
        reply = engine.attached([*pool, *ending], seq, session=6)
        assert reply.n_computed <= 3 + 1
    engine.end_session(6)
    engine.free(seq)


def test_second_turn_of_a_session_goes_on_where_it_was(engine: Engine, floor: float) -> None:
    """The next turn of a session computes only what is new, also after a neighbour's turn with the RAM cache on."""
    pool = tokens(80, seed=4)
    seq = engine.materialise(pool)
    first = engine.attached([*pool, 11, 12, 13], seq, session=1)
    engine.attached([*pool, 21, 22, 23, 24], seq, session=2)
    engine.completion(tokens(50, seed=5))
    prompt = [*pool, 11, 12, 13, *first.tokens, 31, 32]
    second = engine.attached(prompt, seq, session=1)
    assert second.n_computed <= 3
    assert second.n_shared == 80
    assert_equal(second, engine.fresh(prompt), floor)
    engine.end_session(1)
    engine.end_session(2)
    engine.free(seq)


def test_snapshot_of_a_session_is_a_pool(engine: Engine, floor: float) -> None:
    """A snapshot holds the session's tokens; another session attaches to it whole, and the first one goes on."""
    first = engine.completion(tokens(70, seed=6), 5, engine.attach_headers(session=3))
    shot = engine.snapshot(3)
    assert shot["tokens"] == [*tokens(70, seed=6), *first.tokens[:-1]]
    prompt = [*shot["tokens"], 41, 42]
    reply = engine.attached(prompt, shot["seq"], session=4)
    assert reply.n_shared == len(shot["tokens"])
    assert_equal(reply, engine.fresh(prompt), floor)
    again = engine.completion([*shot["tokens"], 43, 44], 4, engine.attach_headers(session=3))
    assert again.n_computed <= 3
    for session in (3, 4):
        engine.end_session(session)
    engine.free(shot["seq"])


def test_materialisation_does_not_wait_for_a_long_generation(engine: Engine) -> None:
    """Prefill-only work is batched beside a running generation and ends first."""
    order: list[str] = []

    def generate() -> None:
        engine.completion(tokens(5, seed=7), 1500, ignore_eos=True, n_probs=0)
        order.append("generation")

    thread = threading.Thread(target=generate)
    thread.start()
    while not any(slot["state"] == "generating" for slot in engine.state()["slots"]):
        assert thread.is_alive()
    seq = engine.materialise(tokens(40, seed=8))
    order.append("materialisation")
    thread.join()
    assert order == ["materialisation", "generation"]
    engine.free(seq)


def test_everything_is_freed_in_the_end(engine: Engine) -> None:
    """With no pool and no session left the cache holds only what plain requests left in idle slots."""
    state = engine.state()
    assert state["seqs"] == []
    assert all(slot["session"] == 0 for slot in state["slots"])
    assert all(slot["n_shared"] == 0 or slot["n_tokens"] >= slot["n_shared"] for slot in state["slots"])
