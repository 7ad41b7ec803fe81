"""A split cache: pools take a stream each, prefixes are copied with it, and answers are those of a fresh prefill."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.engine.driver import Engine
from tests.engine.judge import assert_equal, noise_floor
from tests.models import tiny_model

pytestmark = pytest.mark.engine

QUANTISED = ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "full": ("full", ()),
    "full-q8_0": ("full", QUANTISED),
    "swa": ("swa", ()),
    "swa-q8_0": ("swa", QUANTISED),
    "hybrid-swa": ("hybrid-swa", ()),
}
N_SLOTS, N_CTX_SLOT, N_POOLS = 3, 1024, 3
SPLIT = ("--no-kv-unified", "-np", N_SLOTS, "-c", N_SLOTS * N_CTX_SLOT, "-t", 1)
SESSIONS = count(1)
ODD = (1, 2, 31, 32, 33, 255, 256, 257)


def tokens(n: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(300, 40000) for i in range(n)]


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest, engine_path: Path) -> Iterator[Engine]:
    kind, more = CASES[request.param]
    with Engine(engine_path, tiny_model(kind), [*SPLIT, *more], max_pools=N_POOLS) as engine:
        yield engine


@pytest.fixture(scope="module")
def floor(engine: Engine) -> float:
    return noise_floor(engine)


@contextmanager
def neighbour(engine: Engine, seq: str, prompt: list[int]) -> Iterator[None]:
    """Somebody generates on the same pool all the time."""
    over, session = threading.Event(), next(SESSIONS)

    def generate() -> None:
        while not over.is_set():
            engine.attached(prompt, seq, 200, session=session, ignore_eos=True, n_probs=0)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        engine.end_session(session)


def test_attach_and_snapshot_beside_a_neighbour(engine: Engine, floor: float) -> None:
    """Any number of tokens past the pool is answered as by a fresh prefill, and so is what a snapshot of it is used for."""
    pool = tokens(75, 1)
    seq = engine.materialise(pool)
    with neighbour(engine, seq, [*pool, 7]):
        for n in ODD:
            mine, other = next(SESSIONS), next(SESSIONS)
            prompt = [*pool, *tokens(n, 100 + n)]
            reply = engine.attached(prompt, seq, session=mine)
            assert reply.n_shared == len(pool)
            assert_equal(reply, engine.fresh(prompt), floor)
            shot = engine.snapshot(mine)
            assert (shot["n_tokens"], shot["cells"], shot["base"]) == (len(shot["tokens"]), len(shot["tokens"]), None)
            later = [*shot["tokens"], 11, 12]
            assert_equal(engine.attached(later, shot["seq"], session=other), engine.fresh(later), floor)
            assert_equal(engine.completion(later, 4, engine.attach_headers(session=mine)), engine.fresh(later), floor)
            engine.free(shot["seq"])
            for session in (mine, other):
                engine.end_session(session)
    assert_equal(engine.attached([*pool, 5], seq), engine.fresh([*pool, 5]), floor)
    clear(engine)


def test_branches_beside_a_neighbour(engine: Engine, floor: float) -> None:
    """Children that go on from their parent, and from their parent's parent when that is gone, are answered as a fresh prefill."""
    pool = tokens(130, 2)
    root = engine.materialise(pool)
    for n in ODD[::2]:
        branch = [*pool, *tokens(n, 200 + n)]
        child = engine.materialise(branch, parent_seq=root, branch_pos=len(pool))
        with neighbour(engine, child, [*branch, 7]):
            leaf = engine.materialise([*branch, 8, 9], parent_seq=child, branch_pos=len(branch))
            engine.free(child)
            assert_equal(engine.attached([*branch, 8, 9, 10], leaf), engine.fresh([*branch, 8, 9, 10]), floor)
            assert engine.seq_tokens(leaf) == [*branch, 8, 9]
            engine.free(leaf)
    clear(engine)


def test_several_completions_of_one_prompt(engine: Engine, floor: float) -> None:
    """Three completions of a prompt on a pool: each is what a fresh prefill gives."""
    pool = tokens(90, 3)
    seq = engine.materialise(pool)
    prompt = [*pool, 21, 22]
    headers = engine.attach_headers(seq)
    reply = engine.http.post(
        "/v1/completions",
        json={"prompt": prompt, "n": N_SLOTS, "max_tokens": 6, "temperature": 0, "logprobs": 1},
        headers=headers,
    )
    assert reply.status_code == 200, reply.text
    assert len({choice["text"] for choice in reply.json()["choices"]}) == 1
    assert_equal(engine.attached(prompt, seq), engine.fresh(prompt), floor)
    clear(engine)


def test_each_holder_has_cells_of_its_own(engine: Engine) -> None:
    """Nothing is shared: what is in use is the sum over sequences and slots; a pool is worth a stream."""
    hello = engine.hello()
    kv = hello["kv"]
    assert (hello["n_ctx_slot"], kv["unified"], kv["streams"]) == (N_CTX_SLOT, False, N_SLOTS + N_POOLS)
    assert kv["cells"] == kv["streams"] * N_CTX_SLOT
    streams = N_POOLS * N_CTX_SLOT * kv["bytes_per_token"] + kv["cells_swa"] // 2 * kv["bytes_per_token_swa"]
    assert hello["pools_price_bytes"] == streams + N_POOLS * kv["bytes_recurrent_per_seq"]
    pool = tokens(80, 4)
    seq = engine.materialise(pool)
    child = engine.post_seqs({"tokens": [*pool, 5, 6], "parent_seq": seq, "branch_pos": 80})[1]
    assert (child["n_cached"], child["base"], child["n_shared"], child["cells"]) == (80, None, 0, 82)
    for _ in range(2):
        assert engine.attached([*pool, 7], seq, session=next(SESSIONS)).n_shared == 80
    state = engine.idle_state()
    held = sum(one["n_tokens"] for one in (*state["seqs"], *state["slots"]))
    assert state["cells"] == {"used": held, "total": kv["cells"]}
    clear(engine)


def clear(engine: Engine) -> None:
    """Give everything back, and see that nothing of it stays."""
    state = engine.idle_state()
    for seq in state["seqs"]:
        assert engine.free(seq["seq"])["freed"]
    for session in {slot["session"] for slot in state["slots"]} - {0}:
        engine.end_session(session)
    state = engine.state()
    assert (state["seqs"], state["cells"]["used"]) == ([], sum(slot["n_tokens"] for slot in state["slots"]))


def test_one_slot(engine_path: Path) -> None:
    """With one slot a pool is made through it and used by it."""
    with Engine(engine_path, tiny_model("full"), ["-c", 512, "-np", 1, "-t", 1, "--no-kv-unified"], max_pools=2) as engine:
        pool = tokens(300, 5)
        seq = engine.materialise(pool)
        reply = engine.attached([*pool, 3, 4], seq)
        assert (engine.hello()["n_ctx_slot"], reply.n_shared) == (512, 300)
        assert_equal(reply, engine.fresh([*pool, 3, 4]), noise_floor(engine))


def test_without_a_size_pools_are_off_and_say_so(engine_path: Path) -> None:
    """How large a stream would be is the engine's to find out then: pools are off, hello and POST seqs give reason and remedy."""
    with Engine(engine_path, tiny_model("one-layer"), ["-np", 2, "-t", 1, "--no-kv-unified"]) as engine:
        hello = engine.hello()
        assert hello["max_pools"] == 0
        assert "give -c" in hello["prefix_sharing_why"]
        name, error = engine.post_seqs({"tokens": [1, 2, 3]})
        assert (name, error["status"], error["type"]) == ("http", 501, "pools_off")


def test_streams_that_cannot_be_are_refused_at_start(engine_path: Path) -> None:
    """More cells than a context can have: the engine ends at once and names the figures."""
    args = ["-c", 40_000_000, "-np", 2, "-t", 1, "--no-kv-unified"]
    refused = pytest.raises(RuntimeError, match=r"a stream of 20000000 cells each, 4040000000 in all")
    with refused, Engine(engine_path, tiny_model("one-layer"), args, max_pools=200):
        pass
