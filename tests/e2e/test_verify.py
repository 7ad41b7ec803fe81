"""The self-check on the real engine: corruptions brought in through saved files are found, what is right is never called wrong."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from polykv_proxy.api.app import build_app
from polykv_proxy.api.context import ApiContext
from polykv_proxy.core.ledger import Placement
from polykv_proxy.core.pools import Residency, SeqRef
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.ports import EngineAddress
from polykv_proxy.runtime.runtime import Runtime, RuntimeOptions
from tests.engine.driver import HANG_GUARD_S, KEY, Engine
from tests.engine.saved_file import Rows, SavedFile
from tests.models import tiny_model

pytestmark = pytest.mark.engine

L = 300
LENGTHS = (1, 2, 31, 32, 33, 65, 255, 257) if os.environ.get("POLYKV_FULL_MATRIX") else (1, 33, 257)


def tokens(n: int, seed: int) -> list[int]:
    return [random.Random(seed * 7919 + i).randrange(300, 40000) for i in range(n)]


@dataclass
class Side:
    """The proxy's side in this process, over an engine of its own."""

    engine: Engine
    runtime: Runtime
    api: httpx.AsyncClient

    async def pool(self, prefix: list[int], parent: int | None = None, **body: object) -> int:
        path = "/polykv/pools" if parent is None else f"/polykv/pools/{parent}/fork"
        reply = await self.api.post(path, json={"tokens": prefix, **body} if prefix else body)
        assert reply.status_code == 201, reply.text
        return reply.json()["pool_id"]

    async def verify(self, pool: int, **body: object) -> dict:
        reply = await self.api.post(f"/polykv/pools/{pool}/verify", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def save(self, pool: int, path: Path) -> SavedFile:
        """What the pool's sequence holds."""
        await self.runtime.hub.client.save_seq(self.seq(pool), path, 0)
        return SavedFile.read(path)

    async def put(self, pool: int, file: SavedFile, path: Path) -> None:
        """Restore a file, and have the proxy believe that it is the pool's KV."""
        hub = self.runtime.hub
        await hub.client.free_seq(self.seq(pool))
        made = await hub.client.restore_seq(file.write(path), None)
        hub.ledger.displace(pool, Residency.LOST, "test")
        hub.ledger.begin_rebuild(pool)
        hub.ledger.place(pool, Placement(hub.boot_id, made.ref, made.cells))

    def seq(self, pool: int) -> SeqRef:
        found = self.runtime.hub.ledger.tree.get(pool)
        assert found is not None
        assert found.seq is not None
        return found.seq

    async def ask(self, prompt: list[int], **headers: str) -> None:
        """A request past the proxy."""
        await asyncio.to_thread(self.engine.completion, prompt, 6, headers)


@asynccontextmanager
async def side(engine_path: Path, model: Path, *args: object, max_pools: int = 8) -> AsyncIterator[Side]:
    with Engine(engine_path, model, ["-c", 4096, "-np", 2, "--cache-ram", 0, *args], max_pools=max_pools) as engine:
        client = EngineClient(EngineAddress(uds=str(engine.socket)), KEY)
        runtime = await Runtime.start(client, RuntimeOptions(sweep_s=None))
        transport = httpx.ASGITransport(build_app(ApiContext(runtime)))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=HANG_GUARD_S) as api:
            await asyncio.wait_for(runtime.link.known(), HANG_GUARD_S)
            yield Side(engine, runtime, api)
        await runtime.stop()


Corruption = Callable[[SavedFile, SavedFile], None]
"""Changes the first file; the second is a right one of another prefix of the same length."""


def swapped(rows: list[Rows], a: int, b: int) -> None:
    for row in rows:
        row[[a, b]] = row[[b, a]]


def keys_of_two_cells(file: SavedFile, _: SavedFile) -> None:
    cache = file.cache()
    swapped(cache.keys, cache.cell(40), cache.cell(L - 60))


def values_of_two_cells(file: SavedFile, _: SavedFile) -> None:
    cache = file.cache()
    swapped(cache.values, cache.cell(40), cache.cell(L - 60))


def every_position_by_one(file: SavedFile, _: SavedFile) -> None:
    cache = file.cache()
    cache.pos[:] = (cache.pos + 1) % L


def two_cells_as_a_whole(file: SavedFile, _: SavedFile) -> None:
    """Nothing but their positions is wrong."""
    cache = file.cache()
    swapped([*cache.keys, *cache.values], cache.cell(L // 3), cache.cell(2 * L // 3))


def foreign_cells(file: SavedFile, other: SavedFile) -> None:
    mine, theirs = file.cache(), other.cache()
    for position in range(L // 3, 2 * L // 3):
        for here, there in zip([*mine.keys, *mine.values], [*theirs.keys, *theirs.values], strict=True):
            here[mine.cell(position)] = there[theirs.cell(position)]


def one_layer_of_another(file: SavedFile, other: SavedFile) -> None:
    file.cache().values[-1][:] = other.cache().values[-1]


def the_end_cut_off(file: SavedFile, _: SavedFile) -> None:
    """As a write that ended early, with zeros in the place of the rest."""
    cache = file.cache()
    for row in [*cache.keys, *cache.values]:
        row[cache.pos >= L - L // 4] = 0


def all_of_another(file: SavedFile, other: SavedFile) -> None:
    file.parts, file.checkpoints = other.parts, other.checkpoints


def the_last_state_of_another(file: SavedFile, other: SavedFile) -> None:
    file.parts = other.parts


def a_kept_state_of_another(file: SavedFile, other: SavedFile) -> None:
    file.checkpoints[-2:] = other.checkpoints[-2:]


def bits_of_one_state(file: SavedFile, _: SavedFile) -> None:
    """A few numbers of the last state, at its end: one layer's."""
    state = file.parts[0].tgt
    numbers = np.frombuffer(state, "<f4", 64, len(state) - 4 * 64)
    numbers[:] = -numbers - 1


ATTENTION = [
    keys_of_two_cells,
    values_of_two_cells,
    every_position_by_one,
    two_cells_as_a_whole,
    foreign_cells,
    one_layer_of_another,
    the_end_cut_off,
    all_of_another,
]
STATES = [all_of_another, the_last_state_of_another, a_kept_state_of_another]
CASES = {
    "full": ATTENTION,
    "swa": [*STATES, keys_of_two_cells, foreign_cells, the_end_cut_off],
    "recurrent": [*STATES, bits_of_one_state],
    "hybrid": [*STATES, foreign_cells, bits_of_one_state],
}


@pytest.mark.parametrize("kind", CASES)
async def test_each_corruption_is_found_and_replaced(kind: str, engine_path: Path, tmp_path: Path) -> None:
    """Saved and restored as it is, the pool is ok. Each corruption is a mismatch; then its KV is new, and ok."""
    async with side(engine_path, tiny_model(kind), "-t", 1) as proxy:
        pool, other = await proxy.pool(tokens(L, 1)), await proxy.pool(tokens(L, 2))
        foreign = await proxy.save(other, tmp_path / "other")
        for corruption in CASES[kind]:
            right = await proxy.save(pool, tmp_path / "right")
            await proxy.put(pool, right, tmp_path / "same")
            assert (await proxy.verify(pool))["verdict"] == "ok", corruption
            corruption(right, foreign)
            await proxy.put(pool, right, tmp_path / "wrong")
            wrong = proxy.seq(pool)
            found = await proxy.verify(pool)
            assert (found["verdict"], found["quarantined"], found["residency"]) == ("mismatch", [pool], "resident"), corruption
            assert found["max_abs_diff"] > found["tolerance"]
            assert proxy.seq(pool) != wrong
            assert (await proxy.verify(pool))["verdict"] == "ok"
            foreign = await proxy.save(other, tmp_path / "other")
        state = proxy.engine.state()
        assert {seq["seq"] for seq in state["seqs"]} == {str(proxy.seq(pool)), str(proxy.seq(other))}
        assert [slot["n_tokens"] for slot in state["slots"]] == [0, 0]


async def test_what_shares_the_wrong_cells_goes_with_them(engine_path: Path, tmp_path: Path) -> None:
    """A root with foreign cells, a child on it, a grandchild and a slot: pools are made anew and right, the slot is empty."""
    async with side(engine_path, tiny_model("full"), "-t", 1) as proxy:
        root = tokens(L, 1)
        pool, other = await proxy.pool(root), await proxy.pool(tokens(L, 2))
        right, foreign = await proxy.save(pool, tmp_path / "right"), await proxy.save(other, tmp_path / "other")
        foreign_cells(right, foreign)
        await proxy.put(pool, right, tmp_path / "wrong")
        child = await proxy.pool([*root, *tokens(20, 3)], pool)
        grandchild = await proxy.pool([*root, *tokens(20, 3), *tokens(20, 4)], child)
        await proxy.ask([*root, *tokens(20, 3), 5], **proxy.engine.attach_headers(str(proxy.seq(child))))
        found = await proxy.verify(grandchild)
        assert (found["verdict"], found["quarantined"]) == ("mismatch", [pool, child, grandchild])
        assert [slot["n_tokens"] for slot in proxy.engine.state()["slots"]] == [0, 0]
        for each in (pool, child, grandchild, other):
            assert (await proxy.verify(each))["verdict"] == "ok"
        assert proxy.engine.used_cells() == L + 20 + 20 + L


@pytest.mark.parametrize("kind", ["full", "swa", "recurrent", "hybrid", "hybrid-swa"])
async def test_right_pools_are_never_called_wrong(kind: str, engine_path: Path, tmp_path: Path) -> None:
    """Of all lengths, of roots and children, of a session's own tokens, saved and restored; with other work beside."""
    async with side(engine_path, tiny_model(kind), "-t", 2) as proxy:
        for n in LENGTHS:
            root = await proxy.pool(tokens(n, n))
            child = await proxy.pool([*tokens(n, n), *tokens(1 + n // 2, n + 1)], root)
            await proxy.ask([*tokens(n, n), 5, 6], **{"x-polykv-req": str(n), "x-polykv-session": str(n)})
            for pool in (root, child):
                busy = asyncio.ensure_future(proxy.ask(tokens(40, n + 2)))
                found = await proxy.verify(pool, n_positions=16)
                await busy
                assert (found["verdict"], found["reason"]) in {("ok", None), ("inconclusive", found["reason"])}, (n, found)
                assert found["verdict"] == "ok" or (n == 1 and kind != "full") or "pushed out" in found["reason"], found
            await proxy.put(root, await proxy.save(root, tmp_path / "file"), tmp_path / "same")
            assert (await proxy.verify(root, n_positions=16))["verdict"] == "ok"
            assert (await proxy.api.delete(f"/polykv/pools/{root}?recursive=1")).status_code == 200


async def test_pools_of_quantised_kv(engine_path: Path, tmp_path: Path) -> None:
    """Right ones are ok, and foreign cells are found."""
    args = ("-t", 2, "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")
    async with side(engine_path, tiny_model("full"), *args) as proxy:
        pool, other = await proxy.pool(tokens(L, 1)), await proxy.pool(tokens(L, 2))
        assert (await proxy.verify(pool))["verdict"] == "ok"
        right, foreign = await proxy.save(pool, tmp_path / "right"), await proxy.save(other, tmp_path / "other")
        foreign_cells(right, foreign)
        await proxy.put(pool, right, tmp_path / "wrong")
        assert (await proxy.verify(pool))["verdict"] == "mismatch"


async def test_a_short_pool_of_a_quantised_model_beside_long_sessions(smollm2: Path, engine_path: Path) -> None:
    """Cells of a long session between the pool's and a request's change the rounding, and two computations do not show it."""
    async with side(engine_path, smollm2, "-t", 2) as proxy:
        ids = proxy.engine.http.post("/tokenize", json={"content": Path(__file__).read_text()}).json()["tokens"]
        pool = await proxy.pool(ids[:24])
        await proxy.ask(ids[24:924], **{"x-polykv-req": "7", "x-polykv-session": "7"})
        found = await proxy.verify(pool)
        assert (found["verdict"], found["reason"]) == ("ok", None)


async def test_a_quantised_model_has_a_floor_of_its_own(smollm2: Path, engine_path: Path, tmp_path: Path) -> None:
    """SmolLM2 (Q4_1): its rounding is many times that of the tiny models and no mismatch; the cells of another prompt are one."""
    async with side(engine_path, smollm2, "-t", 2) as proxy:
        ids = proxy.engine.http.post("/tokenize", json={"content": Path(__file__).read_text()}).json()["tokens"]
        pool, other = await proxy.pool(ids[:120]), await proxy.pool(ids[400:520])
        found = await proxy.verify(pool, n_positions=6)
        assert found["verdict"] == "ok"
        right, foreign = await proxy.save(pool, tmp_path / "right"), await proxy.save(other, tmp_path / "other")
        all_of_another(right, foreign)
        await proxy.put(pool, right, tmp_path / "wrong")
        assert (await proxy.verify(pool, n_positions=6))["verdict"] == "mismatch"
