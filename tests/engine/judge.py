"""How a pooled answer is compared with a fresh prefill: ids up to the first near-tie, log-probs within the noise floor.

Law: pure of pools. Moved cells and other batch shapes change rounding (the engine splits attention by cell index), so the floor is
measured first, on the stock paths alone: fresh prefills at other cell offsets, and prompts continued from a slot's own cache. The
tolerance is three times that floor, and never less than `LEAST`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.engine.driver import Engine, Reply

DOCS = Path(__file__).resolve().parents[2] / "docs"

LEAST = 0.05
"""Log-prob units; rounding of flash attention, which works on f16, on the tiny models."""
LEAST_PLAIN = 0.01
"""The same with `-fa off`."""


Source = Callable[[int, int], list[int]]
"""From a number of tokens and a seed to these tokens."""


def noise_floor(engine: Engine, n: int = 4, source: Source | None = None) -> float:
    """Largest log-prob difference between stock answers to one prompt that only rounding tells apart."""
    worst = 0.0
    for seed in range(8):
        prompt = (source or scattered)(40 + 20 * seed, seed)
        fresh = engine.fresh(prompt, n, ignore_eos=True)
        engine.completion(prompt[: len(prompt) // 2], 3)  # holds other cells, and is the cache of the next one
        worst = max(worst, distance(engine.completion(prompt, n, ignore_eos=True), fresh))
        worst = max(worst, distance(engine.fresh(prompt, n, ignore_eos=True), fresh))
    return worst


def scattered(n: int, seed: int) -> list[int]:
    """Random ids."""
    return [random.Random(seed * 997 + i).randrange(300, 40000) for i in range(n)]


def text(engine: Engine) -> Source:
    """Pieces of this project's documentation: real models are much less sure of random ids, and so of their roundings.

    ASCII only: a reply has no log-prob for a token that ends within a character.
    """
    words = "".join(path.read_text() for path in sorted(DOCS.glob("*.md"))).encode("ascii", "ignore").decode()
    ids: list[int] = engine.http.post("/tokenize", json={"content": words}).raise_for_status().json()["tokens"]

    def piece(n: int, seed: int) -> list[int]:
        start = seed * 997 % (len(ids) - n)
        return ids[start : start + n]

    return piece


def distance(a: Reply, b: Reply) -> float:
    """Largest log-prob difference over the positions up to the first differing id; an accepted draft carries none."""
    worst = 0.0
    for id_a, id_b, lp_a, lp_b in zip(a.tokens, b.tokens, a.logprobs, b.logprobs, strict=True):
        if lp_a is not None and lp_b is not None:
            worst = max(worst, abs(lp_a - lp_b))
        if id_a != id_b:
            break
    return worst


def assert_equal(answer: Reply, reference: Reply, floor: float, least: float = LEAST) -> None:
    """The two answers are the same within the floor; ids may part only where both candidates are nearly as likely."""
    tolerance = max(least, 3 * floor)
    assert distance(answer, reference) <= tolerance, (answer.tokens, reference.tokens, answer.logprobs, reference.logprobs)
    assert_same_ids(answer.tokens, reference, floor, least)


def assert_same_ids(ids: list[int], reference: Reply, floor: float, least: float = LEAST) -> None:
    """The ids are the reference's, or part where its two best candidates were closer than the tolerance."""
    for position, (id_, want, gap) in enumerate(zip(ids, reference.tokens, reference.gaps, strict=True)):
        if id_ != want:
            assert gap <= 2 * max(least, 3 * floor), f"position {position}: {id_} instead of {want}, which led by {gap}"
            return
