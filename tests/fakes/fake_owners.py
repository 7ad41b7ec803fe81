"""Who owns which of the fake engine's cells: each is counted once, for the oldest sequence that holds it, else for the first slot.

Law: a cell is a number; who holds the same number shares it. Each is worth `BYTES_PER_CELL`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.fakes.fake_records import Seq, Slot

BYTES_PER_CELL = 100


def held(seqs: Sequence[Seq], slots: Sequence[Slot], n_ctx: int) -> dict[str, list[dict]]:
    """The sequences, the oldest first, and the slots, as `state` shows them."""
    counted: set[int] = set()

    def own(cells: list[int]) -> dict[str, int]:
        news = set(cells) - counted
        counted.update(news)
        return {"own_cells": len(news), "own_bytes": len(news) * BYTES_PER_CELL, "checkpoint_bytes": 0}

    return {
        "seqs": [{"seq": seq.ref, "n_tokens": len(seq.tokens), "cells": len(seq.cells), **own(seq.cells)} for seq in seqs],
        "slots": [{**slot.row(n_ctx), **own(slot.cells)} for slot in slots],
    }
