"""The judge of answers: on each memory class a changed token in two hundred is told from rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.driver import Engine, Reply
from tests.engine.judge import assert_equal, distance, end_first, noise_floor
from tests.engine.tree import tokens
from tests.models import smollm2, tiny_model

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kind", ["full", "swa", "recurrent", "hybrid"])
def test_one_wrong_cell_is_seen(kind: str, twin_path: Path) -> None:
    """Answers to prompts that differ in one token, however far back, are not taken for the answer; two in ten may be nearly it."""
    prompt = tokens(200, 3)
    with Engine(twin_path, tiny_model(kind), ["-c", 1024, "-np", 2, "-t", 1, "-kvu", "--cache-ram", 0]) as engine:
        floor, right = noise_floor(engine), engine.fresh([*prompt, 1, 2, 3])
        assert is_equal(engine.fresh([*prompt, 1, 2, 3]), right, floor)
        others = [engine.fresh([*prompt[:at], 777 + at, *prompt[at + 1 :], 1, 2, 3]) for at in range(0, 200, 20)]
        assert sum(is_equal(other, right, floor) for other in others) <= 2


def test_cells_out_of_order_round_differently(twin_path: Path) -> None:
    """Of q8_0 cells this alone does, whatever else moves them."""
    prompt = tokens(60, 5)
    args = ["-c", 1024, "-np", 2, "-t", 1, "-kvu", "--cache-ram", 0, "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"]
    with Engine(twin_path, smollm2(), args) as engine:
        right = engine.fresh(prompt, 4, ignore_eos=True)
        assert distance(end_first(engine, prompt, 4), right) > 0


def is_equal(answer: Reply, reference: Reply, floor: float) -> bool:
    try:
        assert_equal(answer, reference, floor)
    except AssertionError:
        return False
    return True
