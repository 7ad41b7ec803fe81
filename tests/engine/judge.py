"""How a pooled answer is compared with a fresh prefill: ids up to the first near-tie, log-probs within the noise floor.

Law: pure of pools. Moved cells and other batch shapes change rounding (the engine splits attention by cell index, and adds up in
the order of cells), so the floor is measured first, on the stock paths alone: fresh prefills at other cell offsets, prompts
continued from a slot's own cache, and of real models prompts whose end lies in cells before their beginning. The tolerance is three
times that floor, and never less than `LEAST`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

from tests.engine.driver import Engine, Reply

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
    """Pieces of Python's own documentation: real models are much less sure of random ids, and so of their roundings.

    ASCII only: a reply has no log-prob for a token that ends within a character.
    """
    words = "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()
    ids: list[int] = engine.http.post("/tokenize", json={"content": words}).raise_for_status().json()["tokens"]

    def piece(n: int, seed: int) -> list[int]:
        start = seed * 997 % (len(ids) - n)
        return ids[start : start + n]

    return piece


def end_first(engine: Engine, prompt: list[int], n: int) -> Reply:
    """A stock answer to a prompt of which the second half lies in lower cells than the first. The engine has slots 0 and 1."""

    def ask(tokens: list[int], slot: int, n: int = 1, **more: Any) -> Reply:
        return engine.completion(tokens, n, id_slot=slot, **more)

    for slot in (0, 1):  # empty but for two tokens each
        ask(prompt[:2], slot, cache_prompt=False)
    ask(scattered(200 + len(prompt), 1), 0, cache_prompt=False)  # what it leaves behind is room for the second half
    ask(prompt[: len(prompt) // 2], 1)
    ask(prompt[:2], 0, cache_prompt=False)
    return ask(prompt, 1, n, ignore_eos=True)


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
