"""KV on disk through the whole product on tiny models: what comes back answers as a fresh prefill, whatever died meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import Reply
from tests.engine.judge import LEAST, LEAST_PLAIN, assert_equal, noise_floor
from tests.engine.tree import tokens
from tests.fakes.product import Product, product, reached
from tests.fakes.proxy_process import Served
from tests.models import tiny_model

pytestmark = pytest.mark.engine

OPTIONS = ("--max-pools", "8", "--pool-grace-s", "0", "--kv-disk-bytes", "1GiB")
ARGS = ("-c", 4096, "-np", 4, "-fa", "off", "--slot-save-path", tempfile.gettempdir())  # opens /slots/N?action=erase
ROOT = tokens(600, 1)
CHILD = [*ROOT, *tokens(257, 2)]
GRANDCHILD = [*CHILD[:801], *tokens(33, 3)]
CHAIN = {1: ROOT, 2: CHILD, 3: GRANDCHILD}


@pytest.fixture(params=["full", "swa", "recurrent", "hybrid"])
def any_class(request: pytest.FixtureRequest, engine_path: Path, tmp_path: Path) -> Iterator[Product]:
    """The product on each memory class."""
    with product(engine_path, tiny_model(request.param), tmp_path, *OPTIONS, args=ARGS) as proxy:
        yield proxy


def grow(proxy: Product) -> None:
    """1 ─ 2 ─ 3, the last branched inside the second."""
    proxy.pool(tokens=ROOT)
    proxy.fork(1, tokens=CHILD)
    proxy.fork(2, tokens=GRANDCHILD, branch_pos=801)


def shown(proxy: Product) -> dict[int, dict[str, Any]]:
    return {pool["pool_id"]: pool for pool in proxy.get("/polykv/pools")["pools"]}


def residencies(proxy: Product) -> list[str]:
    return [pool["residency"] for pool in shown(proxy).values()]


def disk(proxy: Product) -> dict[str, Any]:
    return proxy.get("/polykv/health")["kv_disk"]


def until_copied(proxy: Product) -> None:
    """Until a quiet moment has given each pool a copy."""
    proxy.until(lambda: all(pool["saved_bytes"] for pool in shown(proxy).values()))


def flush(proxy: Product) -> None:
    proxy.settled()
    assert proxy.http.post("/polykv/pools/1/flush").json()["evicted"] == [3, 2, 1]
    assert proxy.engine.state()["seqs"] == []


def share(proxy: Product, pool: int, n: int = 4) -> Reply:
    """A request on the pool by a slot that holds nothing itself."""
    proxy.settled()
    for slot in proxy.engine.state()["slots"]:
        proxy.engine.http.post(f"/slots/{slot['slot']}?action=erase").raise_for_status()
    reply = proxy.ask([*CHAIN[pool], 11, 12, 13], n, pool_id=pool)
    assert reply.n_shared == len(CHAIN[pool]), reply.body["opencoti"]
    return reply


def right(proxy: Product, pool: int, floor: float, how: str | None = None) -> None:
    """A request on the pool shares all of it and is answered as a fresh prefill is; `how`: its KV came back for it in this way."""
    reply = share(proxy, pool)
    assert [word for word in ("rebuilt", "restored") if reply.body["opencoti"].get(word)] == ([how] if how else [])
    assert_equal(reply, proxy.engine.fresh([*CHAIN[pool], 11, 12, 13]), floor, LEAST_PLAIN)


def test_a_chain_comes_back_from_disk_and_answers_as_a_fresh_prefill(any_class: Product, tmp_path: Path) -> None:
    """Copied in a quiet moment, evicted, read by the next request, parents first; no token of it is computed again."""
    proxy = any_class
    floor = noise_floor(proxy.engine)
    grow(proxy)
    until_copied(proxy)
    held = {pool: (facts["n_shared"], facts["own_kv_bytes"]) for pool, facts in shown(proxy).items()}
    flush(proxy)
    assert residencies(proxy) == ["saved"] * 3
    assert {path.name for path in (tmp_path / "state" / "kv").iterdir()} == {"1.kv", "2.kv", "3.kv"}
    right(proxy, 3, floor, "restored")
    for pool in (2, 1):
        right(proxy, pool, floor, None if proxy.engine.hello()["prefix_sharing"] == "any" else "restored")
    if proxy.engine.hello()["prefix_sharing"] == "any":
        assert {pool: (facts["n_shared"], facts["own_kv_bytes"]) for pool, facts in shown(proxy).items()} == held
    assert (disk(proxy)["n_saves"], disk(proxy)["n_restores"], disk(proxy)["n_refused"]) == (3, 3, 0)


def test_copies_that_are_not_right_are_computed_again(any_class: Product, tmp_path: Path) -> None:
    """A cut one, another pool's, and a missing one: each is refused and deleted, and the answers are right."""
    proxy, kv = any_class, tmp_path / "state" / "kv"
    floor = noise_floor(proxy.engine)
    grow(proxy)
    until_copied(proxy)
    flush(proxy)
    os.truncate(kv / "1.kv", (kv / "1.kv").stat().st_size - 100)
    right(proxy, 1, floor, "rebuilt")
    shutil.copy(kv / "3.kv", kv / "2.kv")
    (kv / "3.kv").unlink()
    right(proxy, 2, floor, "rebuilt")
    right(proxy, 3, floor, "rebuilt")
    assert (disk(proxy)["n_refused"], sorted(path.name for path in kv.iterdir())) == (3, [])


@pytest.mark.parametrize(("kind", "tail"), [("full", ["resident"]), ("hybrid", [])])
def test_what_was_resident_is_back_after_a_kill_and_after_a_restart(
    kind: str, tail: list[str], engine_path: Path, tmp_path: Path
) -> None:
    """By nobody's request: kill -9 of the engine, a stop and start of both, and kill -9 of the proxy.

    `tail`: what becomes of a pool made just before the stop; the tiny hybrid computes it about as fast as it would be read.
    """
    with product(engine_path, tiny_model(kind), tmp_path, *OPTIONS, args=ARGS) as proxy:
        floor = noise_floor(proxy.engine)
        grow(proxy)
        until_copied(proxy)
        proxy.kill_engine()
        proxy.until(lambda: residencies(proxy) == ["resident"] * 3)
        assert disk(proxy)["n_restores"] == 3
        proxy.engine.socket = Path(proxy.served.socket)
        for pool in CHAIN:
            share(proxy, pool)
        if tail:
            proxy.fork(1, tokens=[*ROOT, *tokens(380, 4)])
    with product(engine_path, tiny_model(kind), tmp_path, *OPTIONS, args=ARGS) as proxy:
        proxy.until(lambda: residencies(proxy) == [*["resident"] * 3, *tail])
        assert disk(proxy)["n_restores"] == 3 + len(tail), "the last was copied at the stop"
        for pool in CHAIN:
            right(proxy, pool, floor)
        until_copied(proxy)
    with Served(engine_path, tiny_model(kind), tmp_path, *OPTIONS, args=[str(arg) for arg in ("-t", 1, *ARGS)]) as served:
        served.process.kill()
        served.process.wait()
    with product(engine_path, tiny_model(kind), tmp_path, *OPTIONS, args=ARGS) as proxy:
        proxy.until(lambda: residencies(proxy) == [*["resident"] * 3, *tail])
        for pool in CHAIN:
            right(proxy, pool, floor)


def test_another_cache_type_finds_foreign_copies(engine_path: Path, tmp_path: Path) -> None:
    """The same model with quantised KV: every copy is refused, every pool computed, and copies of the new kind are made."""
    with product(engine_path, tiny_model("full"), tmp_path, *OPTIONS, args=ARGS) as proxy:
        grow(proxy)
        until_copied(proxy)
    with product(engine_path, tiny_model("full"), tmp_path, *OPTIONS, args=(*ARGS, "-ctk", "q8_0")) as proxy:
        floor = noise_floor(proxy.engine)
        proxy.until(lambda: disk(proxy)["n_refused"])
        right(proxy, 3, floor, "rebuilt")
        for pool in (1, 2):
            right(proxy, pool, floor)
        until_copied(proxy)
        flush(proxy)
        right(proxy, 3, floor, "restored")


def test_decoding_goes_on_while_pools_are_saved_and_read(engine_path: Path, tmp_path: Path) -> None:
    """Three sessions decode while a fourth pool goes to disk and comes back, again and again: all answers are right.

    Others share their batches, whose shapes round in ways that the floor, measured alone, has not seen.
    """
    with product(engine_path, tiny_model("full"), tmp_path, *OPTIONS, args=ARGS) as proxy:
        floor = noise_floor(proxy.engine)
        grow(proxy)
        until_copied(proxy)
        prompts = [[*ROOT, 20 + n] for n in range(3)]
        with ThreadPoolExecutor(3) as threads:
            running = [threads.submit(proxy.ask, prompt, 60, pool_id=1, session_id=f"s{prompt[-1]}") for prompt in prompts]
            while not all(run.done() for run in running):
                evicted = proxy.http.post("/polykv/pools/3/evict")
                assert evicted.status_code in {200, 409}, evicted.text
                assert proxy.ask([*GRANDCHILD, 11], 1, pool_id=3).body["opencoti"]["miss"] in {None, "own_cache_longer"}
            answers = [run.result() for run in running]
        assert disk(proxy)["n_refused"] == 0
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.n_shared == len(ROOT)
            assert_equal(answer, proxy.engine.fresh(prompt, 60), floor, LEAST)


def test_a_proxy_that_dies_while_it_saves_loses_the_copy_only(engine_path: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of an eviction: the next proxy finds no half of anything and pools that answer right."""
    args = [str(arg) for arg in ("-t", 1, *ARGS)]
    for _ in range(3):
        with (
            Served(engine_path, tiny_model("full"), tmp_path, *OPTIONS, args=args) as served,
            reached(served, engine_path, tiny_model("full")) as proxy,
        ):
            if not shown(proxy):
                grow(proxy)
            sock = proxy.ask_and_wait("/polykv/pools/1/flush", b"")
            served.process.kill()
            served.process.wait()
            sock.close()
    with product(engine_path, tiny_model("full"), tmp_path, *OPTIONS, args=ARGS) as proxy:
        floor = noise_floor(proxy.engine)
        kept = {f"{pool}.kv": facts["saved_bytes"] for pool, facts in shown(proxy).items() if facts["saved_bytes"]}
        assert {path.name: path.stat().st_size for path in (tmp_path / "state" / "kv").iterdir()} == kept
        for pool, prefix in CHAIN.items():
            assert_equal(share(proxy, pool), proxy.engine.fresh([*prefix, 11, 12, 13]), floor, LEAST_PLAIN)
