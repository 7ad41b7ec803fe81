"""F019: speculative decoding with pools: same ids on and off, drafts go on being accepted, nothing is kept of released pools."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engine.driver import Engine
from tests.models import tiny_model

pytestmark = pytest.mark.engine

N_SESSIONS = 4
N_ROUNDS = 20


def tokens(n: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(300, 40000) for i in range(n)]


def replay(engine: Engine) -> list[list[int]]:
    """20 rounds of four sessions on one pool; the ids that were generated, in order."""
    pool = [*tokens(20, 1), *tokens(12, 2), *tokens(12, 2), *tokens(12, 2)]
    seq = engine.materialise(pool)
    history = {session: [*pool, 100 + session] for session in range(1, N_SESSIONS + 1)}
    produced = []
    for turn in range(N_ROUNDS):
        for session, prompt in history.items():
            reply = engine.attached(prompt, seq, 6, session=session, ignore_eos=True, n_probs=0)
            assert reply.n_shared == len(pool)
            produced.append(reply.tokens)
            prompt += [*reply.tokens, 200 + turn]
    for session in history:
        engine.end_session(session)
    engine.free(seq)
    assert engine.used_cells() == 0
    return produced


@pytest.fixture(scope="module", params=["-kvu", "--no-kv-unified"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


def n_counted(engine: Engine) -> int:
    return sum(slot["totals"]["n_decoded"] for slot in engine.state()["slots"])


def run(engine_path: Path, layout: str, *speculation: str | int | Path) -> tuple[list[list[int]], str]:
    """What was generated, and the engine's log. Its counters have exactly the accepted tokens."""
    args: Sequence[str | int | Path] = ["-c", 2048, "-np", N_SESSIONS, "-t", 1, layout, "--cache-ram", 0, *speculation]
    with Engine(engine_path, tiny_model("full-f32"), args) as engine:
        assert engine.hello()["speculative"] is bool(speculation)
        ids = replay(engine)
        assert n_counted(engine) == sum(map(len, ids))
        return ids, engine.log()


@pytest.fixture(scope="module")
def plain(engine_path: Path, layout: str) -> list[list[int]]:
    return run(engine_path, layout)[0]


def accepted(log: str) -> list[int]:
    """Accepted drafts of each request, as the engine logs them."""
    return [int(line.split("(")[1].split()[0]) for line in log.splitlines() if "draft acceptance" in line]


def test_draft_model(engine_path: Path, layout: str, plain: list[list[int]]) -> None:
    """With a draft model the ids are those without, and drafts are accepted to the last round."""
    draft = ("--spec-type", "draft-simple", "--spec-draft-model", tiny_model("draft"), "--spec-draft-n-max", 4)
    ids, log = run(engine_path, layout, *draft)
    assert ids == plain
    counts = accepted(log)
    assert sum(counts[-N_SESSIONS * 5 :]) > 0


def test_ngram_draft(engine_path: Path, layout: str, plain: list[list[int]]) -> None:
    """With n-gram drafts the ids are those without."""
    ids, _ = run(engine_path, layout, "--spec-type", "ngram-simple", "--spec-draft-n-max", 4)
    assert ids == plain
