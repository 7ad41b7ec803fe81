"""What the tests of KV on disk share: a rig that keeps copies, a chain of pools, and questions to both.

Law: looks at the folder and at the API; what is wrong is for the tests to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from polykv_proxy.core.ledger import LedgerLimits
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, rig

BASE = list(range(100, 140))
CHILD = [*BASE, 5, 6]
GRANDCHILD = [*BASE, 5, 6, 7, 8]
LIMIT = 10**9


@asynccontextmanager
async def vault(folder: Path, engine: FakeEngine | None = None, limit: int = LIMIT, **more: object) -> AsyncIterator[Rig]:
    """A rig that keeps copies."""
    more.setdefault("limits", LedgerLimits(pool_grace_s=0.0))
    async with rig(folder, engine, state_dir=folder / "state", kv_disk_bytes=limit, **more) as proxy:  # type: ignore[arg-type]
        yield proxy


def files(folder: Path) -> dict[str, int]:
    kv = folder / "state" / "kv"
    return {path.name: path.stat().st_size for path in sorted(kv.iterdir())} if kv.exists() else {}


async def chain(proxy: Rig) -> None:
    """1 ─ 2 ─ 3."""
    await proxy.pool(tokens=BASE)
    for parent, tokens in ((1, CHILD), (2, GRANDCHILD)):
        assert (await proxy.api.post(f"/polykv/pools/{parent}/fork", json={"tokens": tokens})).status_code == 201


async def verb(proxy: Rig, pool: int, name: str) -> tuple[int, dict]:
    reply = await proxy.api.post(f"/polykv/pools/{pool}/{name}")
    return reply.status_code, reply.json()


async def shown(proxy: Rig, pool: int) -> dict:
    return (await proxy.api.get(f"/polykv/pools/{pool}")).json()


async def residencies(proxy: Rig) -> dict[int, str]:
    return {p["pool_id"]: p["residency"] for p in (await proxy.api.get("/polykv/pools")).json()["pools"]}


async def disk(proxy: Rig) -> dict:
    return (await proxy.api.get("/polykv/health")).json()["kv_disk"]


async def use(proxy: Rig, pool: int, prompt: list[int]) -> dict:
    """A request on the pool from a slot without cells of its own: what the reply says of it, and how many tokens were computed."""
    for slot in proxy.engine.slots:
        slot.clear()
    before = proxy.engine.computed
    reply = await proxy.call("/completion", {"prompt": prompt, "pool_id": pool, "n_predict": 1})
    assert reply.status_code == 200, reply.text
    await proxy.settle()
    return {**reply.json()["opencoti"], "computed": proxy.engine.computed - before}


async def until_saving(proxy: Rig, pool: int) -> None:
    async with asyncio.timeout(20):
        while ("POST", f"/_polykv/v1/seqs/{proxy.runtime.pools.find(pool).seq}/save") not in proxy.server.calls:
            await asyncio.sleep(0.005)
