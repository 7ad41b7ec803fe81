"""Agents before a whole proxy over a fake engine whose words a test writes.

Law: pools, sessions, admission and counts are the real proxy's; only what the model says is scripted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage

from opencoti_langgraph import OpencotiChatModel, PoolClient
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.scripted_chat import Answer
from tests.integration.rig import Rig, relayed, rig

Say = Callable[[dict[str, Any]], Answer]


@dataclass
class Fleet:
    """The proxy, a model and a client of it. `say` is the model's mind; `asked` are the chats that came, by what they named."""

    proxy: Rig
    model: OpencotiChatModel
    client: PoolClient
    say: Say = lambda body: Answer("done.")
    asked: list[dict[str, Any]] = field(default_factory=list)

    def brain(self, body: Any) -> Answer:
        self.asked.append(dict(body))
        return self.say(body)

    async def tree(self) -> dict[str, str | None]:
        """Pools by name, each with its parent's name."""
        listed = (await self.proxy.api.get("/polykv/pools")).json()["pools"]
        names = {pool["pool_id"]: pool["name"] for pool in listed}
        return {pool["name"]: names.get(pool["parent"]) for pool in listed}

    async def listed(self) -> list[dict[str, Any]]:
        return (await self.proxy.api.get("/polykv/pools")).json()["pools"]

    async def sessions(self) -> list[str]:
        return [one["session_id"] for one in (await self.proxy.api.get("/polykv/sessions")).json()["sessions"]]

    @asynccontextmanager
    async def time_passing(self) -> AsyncIterator[None]:
        """The proxy's clock goes on while this is open, and who waits for admission is looked at again."""

        async def pass_on() -> None:
            while True:
                self.proxy.clock.now += 0.01
                self.proxy.runtime.admission.wake()
                await asyncio.sleep(0.005)

        task = asyncio.create_task(pass_on())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def later(self, seconds: float) -> None:
        """Time passes, and the proxy sweeps what has expired."""
        self.proxy.clock.now += seconds
        for _ in range(6):
            await self.proxy.runtime.sweep()
            await self.proxy.settle()


@asynccontextmanager
async def fleet(folder: Path, **engine: Any) -> AsyncIterator[Fleet]:
    async with rig(folder, FakeEngine(**{"n_slots": 4, "max_pools": 12, **engine})) as proxy, relayed(proxy) as (_, http):
        url = str(http.base_url)
        with PoolClient(url) as client:
            world = Fleet(proxy, OpencotiChatModel(base_url=f"{url}/v1", model="toy", max_tokens=2), client)
            proxy.server.brain = world.brain
            yield world


async def run(agent: Any, text: str | list[BaseMessage], config: Any = None, *, way: str = "async", **state: Any) -> dict[str, Any]:
    """One run of an agent, sync (in a thread) or async."""
    messages = [HumanMessage(text)] if isinstance(text, str) else text
    ask = {"messages": messages, **state}
    if way == "sync":
        return await asyncio.to_thread(agent.invoke, ask, config)
    return await agent.ainvoke(ask, config)
