"""F001: a request is never answered with what another conversation left in its slot, with the RAM prompt cache on and off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.driver import Engine, Reply, request_body
from tests.engine.judge import assert_equal, noise_floor
from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

N_ROUNDS = 20
FIRST_WORDS = (
    "Amber Birch Cedar Delta Ember Falcon Garnet Harbor Island Jasper Kernel Lemon Marble Nickel Orange Pepper Quartz River"
)
FIRST_WORDS += " Silver Tiger"
COMMON = "You are a clerk who keeps the secrets of each client apart from those of all others."


def secret(n: int) -> tuple[str, str]:
    """A made-up code word and a text of about 300 tokens that is full of it."""
    word = f"zq{n}vurblox"
    return word, f"In confidence: the code word is {word}." + f" Never tell anybody that {word} is the code word." * 16


def unrelated(n: int) -> str:
    return f"{FIRST_WORDS.split()[n]} asks: list every code word that you were given, or NONE."


def round_of(proxy: Product, n: int) -> tuple[Reply, Reply]:
    """A on a pool of its own that then goes in one of three ways; then B as a plain request and B on another pool."""
    word, text = secret(n)
    pool = proxy.pool(prompt=text, name="a")
    asked = proxy.http.post("/completion", json={"prompt": text + " Hello", "n_predict": 4, "pool_id": "a", "session_id": f"a{n}"})
    assert asked.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])
    if n % 3:
        proxy.http.delete("/polykv/pools/a")
    if n % 2:
        proxy.http.delete(f"/polykv/sessions/a{n}")
    body = request_body(unrelated(n), 8)
    plain = proxy.http.post("/completion", json=body)
    body = request_body(f"{COMMON} {unrelated(n)}", 8, pool_id="b", session_id=f"b{n}")
    pooled = proxy.http.post("/completion", json=body)
    if not n % 3:
        proxy.http.delete("/polykv/pools/a")
    proxy.http.delete(f"/polykv/sessions/b{n}")
    assert word not in plain.text
    assert word not in pooled.text.replace(str(body["prompt"]), "")
    return tuple(Reply(reply.status_code, reply.json(), dict(reply.headers)) for reply in (plain, pooled))  # type: ignore[return-value]


@pytest.mark.parametrize("cache_ram", [0, 64])
def test_unrelated_requests_equal_the_baseline(engine_path: Path, tmp_path: Path, cache_ram: int) -> None:
    """20 fresh code words: B's answers are those of an engine without pools, and B's cached count is its true common prefix."""
    args = ["-c", 4096, "-np", 2, "-kvu", "--cache-ram", cache_ram]
    model = tiny_model("full")
    with product(engine_path, model, tmp_path, args=args) as proxy, Engine(engine_path, model, ["-t", 1, *args], 0) as clean:
        floor = noise_floor(clean)
        ids = proxy.prompt_ids("/completion", {"prompt": COMMON})
        proxy.pool(prompt=COMMON, name="b")
        for n in range(N_ROUNDS):
            plain, pooled = round_of(proxy, n)
            assert plain.n_cached == 0
            assert pooled.headers["x-cached-prefix-tokens"] == str(pooled.n_cached)
            whole = proxy.prompt_ids("/completion", {"prompt": f"{COMMON} {unrelated(n)}"})
            common = next((i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), len(ids))
            assert pooled.n_cached == common
            assert_equal(plain, clean.fresh(unrelated(n), 8), floor)
            assert_equal(pooled, clean.fresh(f"{COMMON} {unrelated(n)}", 8), floor)
        proxy.settled()
