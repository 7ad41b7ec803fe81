"""Pools whose KV is checked, over the fake engine: a family of them, and cells that hold what they should not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from polykv_proxy.core.sessions import is_own
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, rig

BASE = list(range(100, 140))
CHILD = [*BASE, *range(200, 210)]


async def verify(proxy: Rig, pool: object, **body: object) -> dict:
    """Check a pool, and expect an answer and nothing left of the check."""
    reply = await proxy.api.post(f"/polykv/pools/{pool}/verify", json=body)
    assert reply.status_code == 200, reply.text
    assert not [slot for slot in proxy.engine.slots if is_own(slot.session)]
    return reply.json()


@asynccontextmanager
async def family(folder: Path) -> AsyncIterator[Rig]:
    """A rig with pools: 1 of 40 tokens; 2 below it of 50; 3 below 2 of 52; 4 below 1, leaving it at 30; 5 alone."""
    async with rig(folder, FakeEngine(max_pools=8)) as proxy:
        await proxy.pool(tokens=BASE)
        for parent, tokens in ((1, CHILD), (2, [*CHILD, 7, 8]), (1, [*BASE[:30], 9, 9])):
            assert (await proxy.api.post(f"/polykv/pools/{parent}/fork", json={"tokens": tokens})).status_code == 201
        await proxy.pool(tokens=[5, 6, 7])
        yield proxy


def seq_of(proxy: Rig, pool: int) -> str:
    """The sequence of a pool."""
    found = proxy.runtime.hub.ledger.tree.get(pool)
    assert found is not None
    return str(found.seq)


def corrupt(proxy: Rig, pool: int, position: int) -> None:
    """Other KV lies in that cell of the pool, for all who share it."""
    seq = proxy.engine.seq(seq_of(proxy, pool))
    assert seq is not None
    proxy.engine.kv.corrupt(seq.cells[position])


async def shown(proxy: Rig, pool: object) -> dict:
    """The record of a pool."""
    return (await proxy.api.get(f"/polykv/pools/{pool}")).json()


async def use(proxy: Rig, pool: int, prompt: list[int], **body: object) -> httpx.Response:
    """A request that names a pool, and must succeed."""
    reply = await proxy.call("/completion", {"prompt": prompt, "pool_id": pool, "n_predict": 1, **body})
    assert reply.status_code == 200, reply.text
    return reply
