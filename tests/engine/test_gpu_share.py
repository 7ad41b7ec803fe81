"""Engines that share a device: they find each other, take turns, and answer while they wait.

Law: the device is a key; a CPU does as well. Nothing is timed: what is counted is what the engine did meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import httpx
import pytest

from polykv_proxy.gpu_share import layout, schedule
from tests.engine.driver import EXIT_GRACE_S, KEY, Engine
from tests.integration.gpu_share.peers import busy_neighbour, new_key, segment
from tests.models import tiny_model

pytestmark = pytest.mark.engine

ARGS = ["-c", 4096, "-np", 2, "-t", 1]
N_TRIES = 50
"""Operations that are sent while the engine waits, until ten were answered before its window opened."""


def shared(path: Path, key: str, *args: str | int, weight: str = "1", model: str = "one-layer") -> Engine:
    return Engine(
        path, tiny_model(model), [*ARGS, *args], env={"LLAMA_ARG_GPU_SHARE_KEY": key, "LLAMA_ARG_GPU_SHARE_WEIGHT": weight}
    )


@pytest.fixture
def key() -> Iterator[str]:
    with new_key() as made:
        yield made


def test_two_engines_find_each_other_and_both_answer_as_alone(engine_path: Path, key: str) -> None:
    """Their places are in the log, in `state` and in shared memory; taking turns changes no token."""
    with shared(engine_path, key, weight="1.5") as first, shared(engine_path, key) as second:
        assert f"gpu-share: joined /opencoti-gpu-{key} slot 0 (weight 1.5, 1 peers alive)" in first.log()
        assert f"gpu-share: joined /opencoti-gpu-{key} slot 1 (weight 1, 2 peers alive)" in second.log()
        assert first.state()["gpu_share"] == {"enabled": True, "gpu_key": key, "slot": 0, "weight": 1.5}
        alone = first.completion(list(range(300, 340)), 200).tokens
        replies: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda peer=peer: replies.append(peer.completion(list(range(300, 340)), 200).tokens))
            for peer in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert replies == [alone, alone]
        found = layout.parse(segment(key).read_bytes())
        assert [(one.slot, one.pid) for one in found] == [(0, first.process.pid), (1, second.process.pid)]
        assert found[0].name.startswith("tiny-one-layer")
    assert layout.parse(segment(key).read_bytes()) == ()


def answers_early(engine: Engine, key: str) -> bool:
    """Whether an operation that is sent long before the engine's window is answered before it opens."""
    until = 0
    while until == 0:
        now = time.time_ns() // 1000
        made = schedule.make_schedule(schedule.participants(layout.parse(segment(key).read_bytes()), now))
        verdict = schedule.verdict(made, 0, now)
        if verdict.turn is schedule.Turn.WAIT and verdict.until_us - now > 100_000:
            until = verdict.until_us
    assert engine.end_session(1)["cancelled"] == 0
    return time.time_ns() // 1000 < until


def test_an_engine_that_waits_for_its_turn_does_everything_else(engine_path: Path, key: str) -> None:
    """With a tenth of the device it runs operations, shows its state, takes weights and cancels without waiting for a window."""
    with shared(engine_path, key, weight="0.001") as engine, busy_neighbour(key):
        body = {"prompt": [1, 2, 3], "n_predict": -1, "stream": True, "ignore_eos": True}
        with engine.lines("POST", "/completion", body, {"x-polykv-req": "7", "x-polykv-session": "9"}) as lines:
            while not next(lines).startswith("data"):
                pass
            assert sum(islice((early for _ in range(N_TRIES) if (early := answers_early(engine, key))), 10)) == 10
            reply = engine.http.post("/_polykv/v1/gpu", json={"weight": 2.5})
            assert (reply.status_code, reply.json()["weight"]) == (200, 2.5)
            assert layout.parse(segment(key).read_bytes())[0].weight == 2.5
            assert engine.end_session(9)["cancelled"] == 1
        assert [slot["state"] for slot in engine.state()["slots"]] == ["idle", "idle"]


@contextlib.contextmanager
def busy(engine: Engine) -> Iterator[None]:
    """It computes as long as this lasts, however soon a context is full."""
    ended = threading.Event()

    def generate() -> None:
        while not ended.is_set():
            assert engine.completion([1, 2, 3], 500, ignore_eos=True, n_probs=0).status == 200

    with ThreadPoolExecutor(1) as threads:
        generating = threads.submit(generate)
        try:
            yield
        finally:
            ended.set()
            generating.result()


def wait_busy(key: str, low: float, high: float) -> None:
    """Until the first entry says that its engine computes so great a part of the time."""
    while not low <= layout.parse(segment(key).read_bytes())[0].busy_ppm / 1e6 <= high:
        time.sleep(0.05)


def test_busy_is_the_part_of_the_time_that_an_engine_computes(engine_path: Path, key: str) -> None:
    """Most of it alone, a tenth beside a heavier neighbour (whose windows do not count, although it waits in them), then none."""
    with shared(engine_path, key, weight="0.001") as engine:
        with busy(engine):
            wait_busy(key, 0.5, 1.0)
            with busy_neighbour(key):
                wait_busy(key, 0.001, 0.3)
        wait_busy(key, 0.0, 0.05)


def ask_for_ever(engine: Engine) -> None:
    """A generation that ends with the engine."""
    with contextlib.suppress(httpx.TransportError):
        engine.completion([1, 2, 3], -1, ignore_eos=True)


def loop_ends(path: Path, key: str) -> bool:
    """Whether SIGTERM in mid-generation ends the engine's loop. Its own clean-up waits for open requests, so it is killed then."""
    with shared(path, key, weight="0.001") as engine, busy_neighbour(key):
        asked = threading.Thread(target=ask_for_ever, args=[engine])
        asked.start()
        while all(slot["state"] != "generating" for slot in engine.state()["slots"]):
            time.sleep(0.01)
        engine.process.terminate()
        end = time.monotonic() + EXIT_GRACE_S
        while (ended := "cleaning up before exit" in engine.log()) is False and time.monotonic() < end:
            time.sleep(0.01)
        engine.process.kill()
        asked.join()
        engine.expect_exit = None
        return ended


def test_an_engine_that_waits_for_its_turn_can_be_stopped(engine_path: Path, key: str) -> None:
    """It hears SIGTERM while it waits. Now and then the engine's signal handler waits for itself, so it has three tries."""
    assert any(loop_ends(engine_path, key) for _ in range(3))


def n_batches(engine: Engine) -> int:
    """How many batches were computed since the start."""
    page = engine.http.get("/metrics").text
    return next(int(line.split()[1]) for line in page.splitlines() if line.startswith("llamacpp:n_decode_total "))


def test_long_prompts_beside_a_peer_are_cut_and_whole_ones_are_not(engine_path: Path, key: str) -> None:
    """Prompt batches are short beside peers, but never shorter than a prompt that has to be computed at once."""
    prompt = list(range(300, 2300))
    with shared(engine_path, key, "--metrics", weight="0.001") as engine:
        alone, n_alone = engine.fresh(prompt, 2), n_batches(engine)
        with busy_neighbour(key):
            paced, n_paced = engine.fresh(prompt, 2), n_batches(engine) - n_alone
        assert (paced.status, paced.n_computed) == (200, alone.n_computed)
        assert n_paced > n_alone
    args = ["--embedding", "--pooling", "cls", "-b", 1024, "-ub", 1024]
    with shared(engine_path, key, *args, weight="0.001") as engine, busy_neighbour(key):
        reply = engine.http.post("/embedding", json={"content": list(range(300, 1200))})
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({}, "this engine computes on no GPU, and no --gpu-share-key was given"),
        ({"LLAMA_ARG_GPU_SHARE_KEY": "{key}", "LLAMA_ARG_GPU_SHARE": "off"}, "it was turned off (--gpu-share off)"),
    ],
)
def test_an_engine_that_shares_nothing_says_why_and_leaves_no_trace(
    engine_path: Path, key: str, env: dict[str, str], why: str
) -> None:
    given = {name: value.format(key=key) for name, value in env.items()}
    before = set(segment(key).parent.glob("opencoti-gpu-*"))
    with Engine(engine_path, tiny_model("one-layer"), ARGS, env=given) as engine:
        assert engine.state()["gpu_share"] == {"enabled": False, "why": why}
        refused = engine.http.post("/_polykv/v1/gpu", json={"weight": 2})
        assert refused.status_code == 501
        assert refused.json()["error"] | {"message": ""} == {"code": 501, "type": "gpu_share_off", "message": ""}
        assert why in refused.json()["error"]["message"]
        assert "gpu-share" not in engine.log()
        assert set(segment(key).parent.glob("opencoti-gpu-*")) <= before


def test_a_segment_of_another_kind_is_one_warning_and_the_engine_runs(engine_path: Path, key: str) -> None:
    segment(key).write_bytes(b"something else")
    segment(key).chmod(0o600)
    with shared(engine_path, key) as engine:
        assert engine.completion([1, 2, 3], 4).status == 200
        assert engine.log().count("gpu-share: off: ") == 1
        assert "it has 14 bytes instead of 4096" in engine.state()["gpu_share"]["why"]
    assert segment(key).read_bytes() == b"something else"


@pytest.mark.parametrize("body", ['{"weight": 0}', '{"weight": -1}', '{"weight": 1e9}', '{"weight": "2"}', "{}", "nonsense"])
def test_a_weight_that_is_none_is_refused_and_changes_nothing(shared_engine: Engine, body: str) -> None:
    reply = shared_engine.http.post("/_polykv/v1/gpu", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert shared_engine.state()["gpu_share"]["weight"] == 1.0


def test_the_verb_wants_the_key_of_the_engine(shared_engine: Engine) -> None:
    with shared_engine.client({}) as stranger:
        assert stranger.post("/_polykv/v1/gpu", json={"weight": 2}).status_code == 404
    assert KEY not in json.dumps(shared_engine.state())


@pytest.fixture(scope="module")
def shared_engine(engine_path: Path) -> Iterator[Engine]:
    with new_key() as key, shared(engine_path, key) as engine:
        yield engine


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--gpu-share-weight", "0"], 'must be a number from 0.001 to 1000, not "0"'),
        (["--gpu-share-weight", "two"], 'must be a number from 0.001 to 1000, not "two"'),
        (["--gpu-share-key", "a/b"], 'not "a/b"'),
        (["--gpu-share", "maybe"], 'must be on or off, not "maybe"'),
    ],
)
def test_options_that_make_no_sense_are_refused_at_the_start(engine_path: Path, args: list[str], said: str) -> None:
    done = subprocess.run(
        [engine_path, "-m", tiny_model("one-layer"), *args], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode != 0
    assert said in done.stderr + done.stdout
