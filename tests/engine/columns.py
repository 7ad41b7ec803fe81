"""The columns of the matrix: what an engine with pools can be started with, and few columns that meet all combinations of choices.

Law: names, arguments and the files these name; nothing here starts an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

from tests import models
from tests.engine.judge import LEAST, LEAST_PLAIN
from tests.models.adapter import write_adapter

Argument = str | int | Path


@dataclass(frozen=True, slots=True)
class Column:
    """One way to run. `model`: a kind of tiny model or a real one, `-full` with a full-size window cache."""

    model: str
    cells: str = "unified"
    cache: str = "f16"
    speculation: str = "none"
    adapter: bool = False
    slots: str = "four"
    ram: int = 0
    sleeps: bool = False

    def __str__(self) -> str:
        said = [self.model, self.cells, self.cache, self.speculation, self.slots, f"ram{self.ram}"]
        return "-".join([*said, *["lora"] * self.adapter, *["sleep"] * self.sleeps])

    @property
    def kind(self) -> str:
        return self.model.removesuffix("-swafull")

    @property
    def exact(self) -> bool:
        """Without flash attention, which rounds to f16, answers hardly depend on where cells lie. Quantised cells need it."""
        return self.cache == "f16"

    @property
    def least(self) -> float:
        """How far log-probs may lie apart by rounding: a little changes which step a quantised cell or activation takes."""
        return LEAST_PLAIN if self.exact and self.kind not in REAL else 2 * LEAST

    @property
    def helper(self) -> Path:
        """The draft model: `draft` agrees with `full` often, with others hardly ever; with four slots others are their own."""
        return self.path if self.kind != "full" and self.slots == "four" else models.tiny_model("draft")

    @property
    def path(self) -> Path:
        return REAL[self.kind]() if self.kind in REAL else models.tiny_model(self.kind)

    def model_args(self, folder: Path) -> list[Argument]:
        """What changes answers: the unpatched engine gets it too. An adapter is written to the folder."""
        args: list[Argument] = ["-t", 1]
        if self.model != self.kind:
            args += ["--swa-full"]
        if self.cache == "q8_0":
            args += ["-ctk", "q8_0", "-ctv", "q8_0"]
        args += ["-fa", "off" if self.exact else "on"]
        if self.adapter:
            args += ["--lora", write_adapter(folder / f"{self.kind}.gguf", self.kind, 1)]
        return args

    def args(self, folder: Path) -> list[Argument]:
        """All of it, for an engine with pools. The context of a lone slot is 640 tokens, so that it is soon shifted."""
        n_ctx = 16384 if self.model in LONG_ROOT else 4096
        layout: list[Argument] = ["-c", n_ctx, "--no-kv-unified" if self.cells == "split" else "--kv-unified"]
        if self.slots == "four":
            slots: list[Argument] = [*layout, "-np", 4]
        elif self.cells == "split":
            slots = ["-c", 640, "--no-kv-unified", "-np", 1, "--context-shift"]
        else:
            slots = [*layout, "-np", 1, "--context-shift", "--kv-unified-per-slot", 640]
        return [*self.model_args(folder), *slots, "--cache-ram", self.ram, *self._speculation()]

    def _speculation(self) -> list[Argument]:
        if self.speculation == "ngram":
            return ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", 1, "--spec-ngram-simple-size-m", 8]
        if self.speculation == "draft":
            return ["--spec-type", "draft-simple", "--spec-draft-model", self.helper, "--spec-draft-n-max", 4]
        return []


REAL: dict[str, Callable[[], Path]] = {"smollm2": models.smollm2, "gemma3": models.gemma3}
LONG_ROOT = {"gemma3": 560, "gemma3-swafull": 560}
"""Where a root must be longer than the tree's, to be longer than the model's window."""
CHOICES: dict[str, Sequence[object]] = {
    "model": ("full", "swa", "swa-swafull", "recurrent", "hybrid"),
    "cells": ("unified", "split"),
    "cache": ("f16", "f16-flash", "q8_0"),
    "speculation": ("none", "ngram", "draft"),
    "adapter": (False, True),
    "slots": ("four", "one-shifting"),
    "ram": (0, 64),
    "sleeps": (False, True),
}


def possible(choice: Mapping[str, object]) -> bool:
    """Quantised cells need heads of a multiple of 32, which the tiny hybrids do not have; recurrent ones have no such cells."""
    return choice["cache"] != "q8_0" or choice["model"] in {"full", "swa", "swa-swafull", "smollm2"}


def every() -> Iterator[dict[str, object]]:
    """All possible choices."""
    for values in product(*CHOICES.values()):
        choice = dict(zip(CHOICES, values, strict=True))
        if possible(choice):
            yield choice


def covering(strength: int) -> list[Column]:
    """Columns that meet every possible combination of so many choices, each the one that meets most of those which are left."""
    left = {met for choice in every() for met in combinations(choice.items(), strength)}
    chosen = []
    while left:
        best = max(every(), key=lambda choice: len(left.intersection(combinations(choice.items(), strength))))
        left.difference_update(combinations(best.items(), strength))
        chosen.append(Column(**best))  # type: ignore[arg-type] # the names are its fields
    return chosen


def pairwise() -> list[Column]:
    """All pairs of choices on tiny models."""
    return covering(2)


def full() -> list[Column]:
    """All triples on tiny models, each choice by itself on two more models, and Gemma-3 with both kinds of window cache."""
    return [*alone("smollm2"), *alone("hybrid-swa"), Column("gemma3"), Column("gemma3-swafull"), *covering(3)]


def alone(model: str) -> list[Column]:
    """Each choice that the model has, beside the first of all others."""
    default = {name: values[0] for name, values in CHOICES.items()} | {"model": model}
    choices = [default | {name: value} for name, values in CHOICES.items() if name != "model" for value in values[1:]]
    return [Column(**choice) for choice in (default, *choices) if possible(choice)]  # type: ignore[arg-type]
