"""The tiny models: their bytes. That engines load them is shown in tests/e2e."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny, tiny_model


def test_building_twice_gives_equal_bytes(tmp_path: Path, smollm2: Path) -> None:
    """A tiny model is a function of its kind."""
    first = tiny.build("one-layer", tmp_path / "a.gguf", smollm2)
    second = tiny.build("one-layer", tmp_path / "b.gguf", smollm2)
    assert first.read_bytes() == second.read_bytes() == tiny_model("one-layer").read_bytes()


def test_an_unknown_kind_names_the_known_ones(tmp_path: Path, smollm2: Path) -> None:
    """A wrong kind is refused by a sentence that lists what exists, and nothing is written."""
    with pytest.raises(ValueError, match="unknown kind of tiny model: huge; known are full, full-f32, swa"):
        tiny.build("huge", tmp_path / "x.gguf", smollm2)
    assert list(tmp_path.iterdir()) == []
