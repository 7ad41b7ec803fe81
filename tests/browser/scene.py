"""Pools and sessions to look at: a tree over the fake engine, made through the proxy's own routes.

Law: everything there was made as a client makes it; the same call makes the same scene.
"""

from __future__ import annotations

import asyncio

from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig

ENOUGH = 50
"""Tokens of a running session, before the engine is held."""
WORDS = ("clerk", "tools", "review", "search", "plan", "write", "test", "ship")


def engine(n_pools: int, n_sessions: int) -> FakeEngine:
    """An engine with room for a scene of this size."""
    return FakeEngine(n_slots=max(4, n_sessions), max_pools=n_pools + 8, n_ctx=65536)


async def fill(proxy: Rig, n_pools: int, n_sessions: int, *, running: int = 0) -> list[asyncio.Task]:
    """Pools in a tree three levels deep, and sessions on them. `running` of these are held in mid-answer: their tasks."""
    prefixes: list[list[int]] = []
    for number in range(n_pools):
        parent = None if number % 8 == 0 else number - number % 8 + (number % 8) // 4 * 3
        above = [] if parent is None else prefixes[parent]
        prefixes.append([*above, *range(100 + number * 60, 100 + number * 60 + 12 + 11 * (number % 5))])
        path = "/polykv/pools" if parent is None else f"/polykv/pools/{parent + 1}/fork"
        name = f"{WORDS[number % 8]}-{number // 8}"
        (await proxy.api.post(path, json={"tokens": prefixes[-1], "name": name})).raise_for_status()
    for number in range(n_sessions - running):
        await proxy.call("/completion", ask(prefixes, number, 1 + number % 3))
    await proxy.settle()
    first = n_sessions - running
    tasks = [asyncio.create_task(proxy.call("/completion", ask(prefixes, first + n, 10**6))) for n in range(running)]
    async with asyncio.timeout(60):
        while sum(slot.totals["n_decoded"] >= ENOUGH and slot.state == "generating" for slot in proxy.engine.slots) < running:
            await asyncio.sleep(0)
    if running:
        proxy.engine.hold()
    return tasks


def ask(prefixes: list[list[int]], number: int, n_predict: int) -> dict:
    """A request of session `number` on one of the pools."""
    at = number * 7 % len(prefixes)
    return {"prompt": [*prefixes[at], 20_000 + number], "pool_id": at + 1, "session_id": f"agent-{number}", "n_predict": n_predict}
