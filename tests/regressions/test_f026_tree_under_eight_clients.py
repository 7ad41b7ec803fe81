"""F026: eight clients at once on one tree, through the API: no call breaks, the books add up, and in the end nothing is held."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

from polykv_proxy.core.ledger import LedgerLimits
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, rig
from tests.lengths import length

KINDS = ("create", "fork", "fork", "ask", "ask", "ask", "end", "pin", "unpin", "evict", "flush", "renew", "release", "tree")
N_STEPS = length(50, 625)
EXPECTED = {200, 201, 202, 400, 404, 409, 429}
"""What two callers at once may be told; never a 5xx."""


class Client:
    """Does random things to random pools, for a session of its own or for none."""

    def __init__(self, proxy: Rig, number: int) -> None:
        self.proxy, self.name, self.dice = proxy, f"client-{number}", random.Random(number)
        self.seen: Counter[tuple[str, int]] = Counter()

    async def live(self) -> None:
        for _ in range(N_STEPS):
            pools = (await self.proxy.api.get("/polykv/pools")).json()["pools"]
            await self.step(self.dice.choice(pools)["pool_id"] if pools else None)

    async def step(self, pool: int | None) -> None:
        kind = self.dice.choice(KINDS)
        tail = [self.dice.randrange(300, 900) for _ in range(self.dice.randrange(1, 9))]
        url, post = f"/polykv/pools/{pool}", self.proxy.api.post
        if kind == "create" or pool is None:
            reply = await post("/polykv/pools", json={"tokens": [*range(100, 100 + self.dice.randrange(4, 30)), *tail]})
        elif kind in {"fork", "ask"}:
            held = (await self.proxy.api.get(f"{url}/tokens")).json().get("tokens", [1])
            prompt = [*held[: self.dice.randrange(1, len(held) + 1)], *tail]
            named = {"session_id": self.name} if self.dice.random() < 0.5 else {}
            ask = {"prompt": prompt, "pool_id": pool, "n_predict": 2, **named}
            reply = await (post(f"{url}/fork", json={"tokens": prompt}) if kind == "fork" else self.proxy.call("/completion", ask))
        elif kind == "end":
            reply = await self.proxy.api.delete(f"/polykv/sessions/{self.name}")
        elif kind in {"release", "tree"}:
            reply = await self.proxy.api.delete(url + ("?recursive=1" if kind == "tree" else ""))
        else:
            reply = await post(f"{url}/{kind}", json={"ttl_s": 600} if kind == "renew" else {})
        assert reply.status_code in EXPECTED, (kind, reply.status_code, reply.text)
        self.seen[kind, reply.status_code] += 1


async def test_nothing_breaks_and_nothing_stays(tmp_path: Path) -> None:
    """After mixed calls of eight clients the sums hold; after releasing all, everything is zero, and a second release is 404."""
    engine = FakeEngine(n_slots=4, max_pools=6)
    async with rig(tmp_path, engine, limits=LedgerLimits(pool_grace_s=0)) as proxy:
        clients = [Client(proxy, n) for n in range(8)]
        await asyncio.gather(*(client.live() for client in clients))
        await proxy.settle()
        await proxy.runtime.sweep()  # a pool that was released while it was being made may have left its sequence
        await proxy.settle()
        shown = (await proxy.api.get("/polykv/pools")).json()
        pools = shown["pools"]
        assert sum(pool["residency"] == "resident" for pool in pools) == len(engine.seqs) <= 6
        kv_bytes = [pool["own_kv_bytes"] for pool in pools] + [s["marginal_kv_bytes"] for pool in pools for s in pool["sessions"]]
        assert min([0, *kv_bytes]) == 0
        assert sum(kv_bytes) + shown["other_kv_bytes"] == shown["kv_bytes"]
        happened = sum((client.seen for client in clients), Counter())
        assert {("create", 201), ("fork", 201), ("ask", 200), ("evict", 200), ("evict", 409), ("release", 409)} <= set(happened)
        for client in clients:
            await proxy.api.delete(f"/polykv/sessions/{client.name}")
        for root in [pool["pool_id"] for pool in pools if pool["parent"] is None]:
            assert (await proxy.api.delete(f"/polykv/pools/{root}?recursive=1&over_pins=1")).status_code == 200
            assert (await proxy.api.delete(f"/polykv/pools/{root}")).status_code == 404
        for slot in engine.slots:
            slot.clear()
        capacity = (await proxy.api.get("/polykv/capacity")).json()
        assert [capacity[key] for key in ("seq_ids_used", "n_pools", "n_sessions", "n_requests")] == [0, 0, 0, 0]
        assert (engine.seqs, engine.used_cells()) == ({}, 0)
