"""Sequences in files: a restored one answers as before, takes the cells it took, and a file that is not right is refused."""

from __future__ import annotations

import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Engine
from tests.engine.judge import assert_equal, noise_floor
from tests.models import tiny_model

pytestmark = pytest.mark.engine

KINDS = ["full", "swa", "recurrent", "hybrid"]
LAYOUTS: list[tuple[str, ...]] = [(), ("--no-kv-unified",)]


def tokens(n: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(300, 40000) for i in range(n)]


def save(engine: Engine, seq: str, path: Path, **more: Any) -> dict[str, Any]:
    return engine.http.post(f"/_polykv/v1/seqs/{seq}/save", json={"path": str(path), **more}).json()


def restore(engine: Engine, path: Path, **more: Any) -> dict[str, Any]:
    return engine.http.post("/_polykv/v1/seqs/restore", json={"path": str(path), **more}).json()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=LAYOUTS, ids=["unified", "split"])
def engine(request: pytest.FixtureRequest, kind: str, engine_path: Path) -> Iterator[Engine]:
    with Engine(engine_path, tiny_model(kind), ["-c", 8192, "-np", 2, "-t", 1, "--cache-ram", 0, *request.param]) as engine:
        yield engine


def test_restored_sequence_answers_as_before(engine: Engine, tmp_path: Path) -> None:
    """Save, free, restore: same tokens, same cells, the answers of a fresh prefill, also at a shorter length."""
    floor = noise_floor(engine)
    pool = tokens(3000, 1)
    seq = engine.materialise(pool)
    held = engine.state()["seqs"][0]
    saved = save(engine, seq, tmp_path / "pool")
    assert saved["n_tokens"] == 3000
    assert stat.S_IMODE((tmp_path / "pool").stat().st_mode) == 0o600
    engine.free(seq)
    done = restore(engine, tmp_path / "pool")
    assert done["n_tokens"] == 3000
    assert engine.seq_tokens(done["seq"]) == pool
    again = engine.state()["seqs"][0]
    assert {**again, "seq": seq} == {**held, "seq": seq}
    for prompt in ([*pool, 5, 6], [*pool[:2700], 7, 8]):
        reply = engine.attached(prompt, done["seq"])
        assert reply.n_shared > 2000
        assert_equal(reply, engine.fresh(prompt), floor)
    engine.free(done["seq"])


def test_three_levels_come_back_parents_first(engine_path: Path, tmp_path: Path) -> None:
    """On plain attention each level's file holds its own range, and the restored tree takes the cells it took before."""
    with Engine(engine_path, tiny_model("full"), ["-c", 2048, "-np", 2, "-t", 1, "--cache-ram", 0], max_pools=5) as engine:
        three_levels(engine, tmp_path)


def three_levels(engine: Engine, tmp_path: Path) -> None:
    chain = [tokens(100, 2), [*tokens(100, 2), *tokens(60, 3)], [*tokens(100, 2), *tokens(60, 3)[:30], *tokens(50, 4)]]
    starts = [0, 100, 130]
    seqs = [engine.materialise(chain[0])]
    for prefix, start in zip(chain[1:], starts[1:], strict=True):
        seqs.append(engine.materialise(prefix, parent_seq=seqs[-1], branch_pos=start))
    used = engine.used_cells()
    assert used == 100 + 60 + 50
    for seq, start, name in zip(seqs, starts, "abc", strict=True):
        assert save(engine, seq, tmp_path / name, **{"from": start})["from"] == start
    for seq in seqs:
        engine.free(seq)
    assert engine.used_cells() == 0
    assert "parent_seq" in restore(engine, tmp_path / "b")["error"]["message"]
    back = [restore(engine, tmp_path / "a")["seq"]]
    for name in "bc":
        back.append(restore(engine, tmp_path / name, parent_seq=back[-1])["seq"])
    assert engine.used_cells() == used
    floor = noise_floor(engine)
    for seq, prefix in zip(back, chain, strict=True):
        assert_equal(engine.attached([*prefix, 9], seq), engine.fresh([*prefix, 9]), floor)
    wrong = engine.materialise(tokens(100, 5))
    assert restore(engine, tmp_path / "b", parent_seq=wrong)["error"]["type"] == "file_refused"
    for seq in (*back, wrong):
        engine.free(seq)


def test_damaged_or_foreign_files_are_refused(kind: str, engine: Engine, engine_path: Path, tmp_path: Path) -> None:
    """Cut, changed, empty, foreign and missing files are 409 with the reason; the engine and its ids stay as they were."""
    seq = engine.materialise(tokens(50, 6))
    good = tmp_path / "good"
    save(engine, seq, good)
    engine.free(seq)
    data = good.read_bytes()
    base = engine.used_cells()
    damages = [b"", data[:10], data[:-1], data + b"x", data[:200] + bytes([data[200] ^ 1]) + data[201:], b"x" * len(data)]
    for i, damage in enumerate(damages):
        bad = tmp_path / f"bad{i}"
        bad.write_bytes(damage)
        assert restore(engine, bad)["error"]["type"] == "file_refused"
    assert restore(engine, tmp_path / "missing")["error"]["type"] == "file_refused"
    (tmp_path / "link").symlink_to(good)
    assert restore(engine, tmp_path / "link")["error"]["type"] == "file_refused"
    assert engine.http.post("/_polykv/v1/seqs/restore", json={"path": "relative"}).status_code == 400
    args = ["-c", 8192, "-np", 2, "-t", 1, "-ctk", "q8_0"] if kind == "full" else ["-c", 8192, "-np", 2, "-t", 1]
    other = tiny_model(kind if kind == "full" else "full")
    with Engine(engine_path, other, args) as foreign:
        refused = restore(foreign, good)
        assert refused["error"]["type"] == "file_refused"
        assert "another model" in refused["error"]["message"]
    assert engine.used_cells() == base
    assert engine.state()["seqs"] == []
    assert restore(engine, good)["n_tokens"] == 50
    engine.free(engine.state()["seqs"][0]["seq"])


def test_a_file_that_cannot_be_written_is_507_and_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    """A file that cannot be written is an error with the reason; nothing half-written stays."""
    seq = engine.materialise(tokens(20, 7))
    assert save(engine, seq, tmp_path / "no" / "such" / "folder")["error"]["type"] == "save_failed"
    (tmp_path / "folder").mkdir()
    assert save(engine, seq, tmp_path / "folder")["error"]["type"] == "save_failed"  # written, and cannot take that name
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    engine.free(seq)
