"""What the real engine counts: every token once, in the slot that computed it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.driver import Engine, request_body
from tests.models import tiny_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(engine_path: Path) -> Iterator[Engine]:
    with Engine(engine_path, tiny_model("full"), ["-c", 4096, "-np", 4, "-t", 1, "-kvu"]) as engine:
        yield engine


def totals(engine: Engine) -> dict[str, int]:
    slots = engine.idle_state()["slots"]
    return {name: sum(slot["totals"][name] for slot in slots) for name in ("n_decoded", "n_prompt", "n_cached", "n_launched")}


def grown(engine: Engine, before: dict[str, int]) -> dict[str, int]:
    return {name: now - before[name] for name, now in totals(engine).items()}


def test_variants_of_one_prompt_compute_it_once(engine: Engine) -> None:
    """Three variants: one prompt, three answers."""
    before = totals(engine)
    prompt = [700 + i for i in range(50)]
    reply = engine.http.post("/completion", json=request_body(prompt, 4, n_cmpl=3, ignore_eos=True, cache_prompt=False))
    assert len(reply.raise_for_status().json()) == 3
    assert grown(engine, before) == {"n_decoded": 12, "n_prompt": 50, "n_cached": 0, "n_launched": 3}


def test_a_materialisation_is_told_from_an_answer(engine: Engine) -> None:
    """Its events say `fill`, and how long it took; it decodes nothing."""
    before = totals(engine)
    with engine.lines("GET", "/_polykv/v1/events") as lines:
        assert next(lines) == "event: hello"
        seq = engine.materialise([800 + i for i in range(64)], req=4711)
        told = []
        for line in lines:
            if line.startswith("data: ") and '"req":4711' in line and '"type"' in line:
                told.append(json.loads(line.removeprefix("data: ")))
                if told[-1]["type"] == "released":
                    break
    assert [(one["type"], one["fill"], one["us_prompt"] > 0) for one in told] == [
        ("launched", True, False),
        ("finished", True, True),
        ("released", True, True),
    ]
    assert grown(engine, before) == {"n_decoded": 0, "n_prompt": 64, "n_cached": 0, "n_launched": 1}
    engine.free(seq)
