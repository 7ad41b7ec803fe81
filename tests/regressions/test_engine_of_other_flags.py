"""The proxy is started again over the same state with another engine, model or flags: pools are made anew or refused with a reason,
and no answer is ever wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.product import Product, product
from tests.langgraph.real import TEMPLATE
from tests.lengths import length
from tests.models import tiny_model

pytestmark = pytest.mark.engine

SMALL, LARGE = list(range(600, 700)), [*range(600, 700), *range(1000, 1800)]
SYSTEM = "You are a clerk. Be brief, be polite and never promise a date."
CHAT: dict[str, Any] = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "When?"}], "max_tokens": 2}
ARGS = ("-c", 4096, "-np", 2, "-kvu", "--cache-ram", 0)
OPTIONS = ("--kv-disk-bytes", "1GiB")


class World:
    """One state folder, and the proxies that are started on it."""

    def __init__(self, engine: Path, twin: Path, folder: Path) -> None:
        self.engine, self.twin, self.folder = engine, twin, folder

    @contextmanager
    def started(
        self, *more: str | int | Path, engine: Path | None = None, kind: str = "full", args: Sequence[str | int] = ARGS,
        options: Sequence[str] = OPTIONS,
    ) -> Iterator[Product]:  # fmt: skip
        with product(engine or self.engine, tiny_model(kind), self.folder, *options, args=[*args, *more]) as proxy:
            yield proxy


def residencies(proxy: Product) -> dict[str, str]:
    return {pool["name"]: pool["residency"] for pool in proxy.get("/polykv/pools")["pools"]}


def answers_right(proxy: Product, name: str, tokens: list[int], n_shared: int | None = None) -> str | None:
    """A request on the pool answers as a fresh prefill does and shares all of it (or `n_shared`). What it says of a miss."""
    proxy.settled()
    reply = proxy.ask([*tokens, 7, 8], pool_id=name, session_id=f"on-{name}")
    assert reply.tokens == proxy.engine.fresh([*tokens, 7, 8]).tokens
    assert reply.n_shared == (len(tokens) if n_shared is None else n_shared), reply.body["opencoti"]
    proxy.http.delete(f"/polykv/sessions/on-{name}")
    return reply.body["opencoti"]["miss"]


def serves_in_full(proxy: Product) -> None:
    """Without pools: requests that name none are answered, and a new pool is 501 with what to do."""
    assert proxy.http.post("/completion", json={"prompt": SMALL, "n_predict": 2}).status_code == 200
    refused = proxy.http.post("/polykv/pools", json={"tokens": [1, 2, 3]})
    assert refused.status_code == 501, refused.text
    assert proxy.http.post("/completion", json={"prompt": SMALL, "n_predict": 2, "pool_id": "small"}).status_code in {200, 501}


def grown(proxy: Product) -> dict[str, int]:
    """A pool, a fork of it, and one from messages: their ids."""
    small, large = proxy.pool(tokens=SMALL, name="small"), proxy.fork("small", tokens=LARGE, name="large")
    clerk = proxy.pool(messages=CHAT["messages"][:1], name="clerk")
    return {"small": small["pool_id"], "large": large["pool_id"], "clerk": clerk["pool_id"]}


def other_cache_type(world: World) -> None:
    """Copies on disk are foreign; all is computed."""
    with world.started("-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on") as proxy:
        assert answers_right(proxy, "large", LARGE) is None


def other_positions(world: World) -> None:
    with world.started("--rope-freq-base", "20000") as proxy:
        assert answers_right(proxy, "small", SMALL) is None
        assert answers_right(proxy, "large", LARGE) is None


def split_cache(world: World) -> None:
    with world.started("--no-kv-unified", args=("-c", 4096, "-np", 2, "--cache-ram", 0)) as proxy:
        assert answers_right(proxy, "large", LARGE) is None


def small_context(world: World) -> None:
    """What does not fit is served in full and says so; what does is shared."""
    with world.started(args=("-c", 512, "-np", 2, "-kvu", "--cache-ram", 0)) as proxy:
        assert answers_right(proxy, "small", SMALL) is None
        assert answers_right(proxy, "large", LARGE[:300], n_shared=0) == "rebuild_failed"
        assert proxy.get("/polykv/pools/large")["residency"] != "resident"


def other_template(world: World) -> None:
    """Shared as far as the tokens are the same."""
    with world.started("--jinja", "--chat-template-file", TEMPLATE) as proxy:
        reply = proxy.http.post("/v1/chat/completions", json={**CHAT, "pool_id": "clerk"})
        n_shared = int(reply.headers["x-cached-prefix-tokens"])
        tokens, prompt = proxy.get("/polykv/pools/clerk/tokens")["tokens"], proxy.prompt_ids("/v1/chat/completions", CHAT)
        assert tokens[:n_shared] == prompt[:n_shared]


def other_model(world: World) -> None:
    with world.started(kind="one-layer") as proxy:
        assert set(residencies(proxy).values()) == {"failed"}
        assert {pool["reason"] for pool in proxy.get("/polykv/pools")["pools"]} == {"model_changed"}
        assert answers_right(proxy, "small", SMALL, n_shared=0) == "rebuild_failed"


def no_pools(world: World) -> None:
    with world.started(options=("--max-pools", "0")) as proxy:
        serves_in_full(proxy)


def no_protocol(world: World) -> None:
    with world.started(engine=world.twin, options=()) as proxy:
        serves_in_full(proxy)


ALL = (other_cache_type, other_positions, split_cache, small_context, other_template, other_model, no_pools, no_protocol)


def test_pools_through_other_engines(engine_path: Path, twin_path: Path, tmp_path: Path) -> None:
    """One after the other over the same state; in the end the first engine again has all pools under their ids."""
    world = World(engine_path, twin_path, tmp_path)
    with world.started() as proxy:
        ids = grown(proxy)
        n_clerk = int(proxy.http.post("/v1/chat/completions", json={**CHAT, "pool_id": "clerk"}).headers["x-cached-prefix-tokens"])
        assert n_clerk > 0
    for another in length((small_context, other_model, no_protocol), ALL):
        another(world)
    with world.started() as proxy:
        assert {pool["name"]: pool["pool_id"] for pool in proxy.get("/polykv/pools")["pools"]} == ids
        for name, tokens in (("large", LARGE), ("small", SMALL)):
            assert answers_right(proxy, name, tokens) is None
        again = proxy.http.post("/v1/chat/completions", json={**CHAT, "pool_id": "clerk"})
        assert again.headers["x-cached-prefix-tokens"] == str(n_clerk)
        assert proxy.pool(tokens=[5, 6, 7])["pool_id"] == max(ids.values()) + 1
