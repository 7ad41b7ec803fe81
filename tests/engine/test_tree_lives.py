"""The lives of tests/unit/core/tree_lives.py on the real engine, which does what the core commands beside the naive model of cells.

Law: after each step sequence ids, their cells, and all cells in use agree, and every answer is the unpatched engine's.
`POLYKV_TEST_LIVES` is the number of lives, of at most 50 steps each.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from polykv_proxy.core.pools import SeqRef
from tests.engine.driver import Engine
from tests.engine.judge import LEAST_PLAIN, assert_equal, noise_floor
from tests.models import tiny_model
from tests.unit.core.tree_lives import CLIENTS, Cells, TreeLives

pytestmark = pytest.mark.engine

LIVES = int(os.environ.get("POLYKV_TEST_LIVES", "60"))
GRAIN = 16
"""Real tokens and cells for each one of the model."""
ARGS = ("-c", 4096, "-t", 1, "-kvu", "--cache-ram", 0, "-fa", "off")


def real(tokens: list[int]) -> list[int]:
    """No two of the model's tokens begin alike."""
    return [300 + GRAIN * token + i for token in tokens for i in range(GRAIN)]


@dataclass
class Judge:
    """The unpatched engine, and how often it was asked."""

    clean: Engine
    n_answers: int = 0

    def __post_init__(self) -> None:
        self.floor = noise_floor(self.clean)


@dataclass
class RealCells(Cells):
    """The naive model and the real engine, told the same. Each client is a session, in a slot of its own; one slot stays free."""

    engine: ClassVar[Engine]
    judge: ClassVar[Judge]
    numbers: ClassVar[count[int]] = count(1)
    sessions: dict[str, int] = field(default_factory=dict)

    def make(self, tokens: list[int], base: SeqRef | None, shared: int) -> SeqRef:
        parent = {"parent_seq": str(base), "branch_pos": GRAIN * shared} if base else {}
        return self.hold(SeqRef.parse(self.engine.materialise(real(tokens), **parent)), tokens, base, shared)

    def free(self, seq: SeqRef) -> None:
        super().free(seq)
        assert self.engine.free(str(seq))["freed"] is True

    def attach(self, client: str, tokens: list[int], seq: SeqRef) -> None:
        super().attach(client, tokens, seq)
        session = self.sessions.setdefault(client, next(self.numbers))
        prompt = real(self.slots[client].tokens)
        reply = self.engine.attached(prompt, str(seq), 1, session=session)
        assert (reply.status, reply.n_computed) == (200, len(prompt) - reply.n_cached)
        assert_equal(reply, self.judge.clean.fresh(prompt, 1), self.judge.floor, LEAST_PLAIN)
        self.judge.n_answers += 1

    def leave(self, client: str) -> None:
        super().leave(client)
        if client in self.sessions:
            self.engine.end_session(self.sessions.pop(client))

    def clear(self) -> None:
        for seq in list(self.seqs):
            self.free(seq)
        for client in CLIENTS:
            self.leave(client)

    def n_used(self) -> int:
        """The model's number, after the engine has said the same of every sequence, every slot and all cells."""
        n_used, state = super().n_used(), self.engine.state()
        assert {entry["seq"]: entry["cells"] for entry in state["seqs"]} == {
            str(seq): GRAIN * len(cells) for seq, cells in self.seqs.items()
        }
        assert {slot["session"]: (slot["n_tokens"], slot["n_shared"]) for slot in state["slots"] if slot["session"]} == {
            self.sessions[client]: (GRAIN * len(slot.cells), GRAIN * slot.n_shared) for client, slot in self.slots.items()
        }
        assert state["cells"]["used"] == GRAIN * n_used
        return n_used


class RealLives(TreeLives):
    """The same machine."""

    def new_engine(self) -> RealCells:
        return RealCells()


@pytest.mark.timeout(300 + 3 * LIVES)
def test_the_real_engine_lives_as_the_model_does(engine_path: Path, twin_path: Path) -> None:
    """Steps of create, fork, attach, leave, evict, flush, release and a new boot: the books of both agree, and end at zero."""
    model = tiny_model("full-f32")
    with (
        Engine(engine_path, model, [*ARGS, "-np", len(CLIENTS) + 1], 6) as engine,
        Engine(twin_path, model, [*ARGS, "-np", 2]) as clean,
    ):
        RealCells.engine, RealCells.judge = engine, Judge(clean)
        run = settings(max_examples=LIVES, stateful_step_count=50, deadline=None, derandomize=True, print_blob=False)
        run_state_machine_as_test(RealLives, settings=run)
        assert RealCells.judge.n_answers > 10
        assert engine.used_cells() == 0
