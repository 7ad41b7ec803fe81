"""Agents that are refused for now: they wait as told, hand back, or let it through; and a fleet larger than its slots finishes."""

from __future__ import annotations

import asyncio
import operator
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from opencoti_langgraph import (
    BackpressureMiddleware,
    OpencotiChatModel,
    Patience,
    PoolMiddleware,
    PoolSaturatedError,
    PoolState,
    add_capacity_gate,
)
from tests.fakes.scripted_server import Scripted
from tests.langgraph.fleet import Fleet, fleet, run
from tests.langgraph.reports import Clock


class Refusing:
    """A scripted engine that is full for so many requests."""

    def __init__(self, engine: Scripted, n: int, pool: str = "full") -> None:
        self.engine, self.left, self.pool = engine, n, pool
        self.model = OpencotiChatModel(base_url=engine.url, model="toy")

    def agent(self, middleware: BackpressureMiddleware, **options: Any) -> Any:
        return create_agent(self.model, [], middleware=[middleware, _Full(self)], **options)


class _Full(BackpressureMiddleware):
    """Names the pool that is full while it is full."""

    def __init__(self, refusing: Refusing) -> None:
        super().__init__("raise")
        self._refusing = refusing

    @property
    def name(self) -> str:
        return "full"

    def _named(self, request: Any) -> Any:
        self._refusing.left -= 1
        return request.override(model_settings={"pool_id": self._refusing.pool}) if self._refusing.left >= 0 else request

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(self._named(request))

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(self._named(request))


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_it_waits_as_long_as_the_proxy_said(engine: Scripted, way: str) -> None:
    """Twice refused with 7 s: two waits of 7 s and a little, then the answer; the model was asked three times and no more."""
    clock = Clock()
    agent = Refusing(engine, 2).agent(BackpressureMiddleware(sleep=clock.sleep, asleep=clock.asleep))
    assert (await run(agent, "hi", way=way))["messages"][-1].text == "The keel lies below."
    assert len(engine.bodies) == 3
    assert all(7 <= wait <= 7 * 1.25 for wait in clock.slept)
    assert len(clock.slept) == 2


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_the_wait_is_bounded_as_a_whole(engine: Scripted, way: str) -> None:
    """What would be over the bound is not waited for: the error comes through."""
    clock = Clock()
    agent = Refusing(engine, 99).agent(BackpressureMiddleware(max_wait_s=20, sleep=clock.sleep, asleep=clock.asleep, spread=0))
    with pytest.raises(PoolSaturatedError):
        await run(agent, "hi", way=way)
    assert clock.slept == [7, 7]


async def test_raising_waits_for_nothing(engine: Scripted) -> None:
    """One request, one error."""
    with pytest.raises(PoolSaturatedError):
        await run(Refusing(engine, 1).agent(BackpressureMiddleware("raise")), "hi")
    assert len(engine.bodies) == 1
    with pytest.raises(ValueError, match="sometimes"):
        BackpressureMiddleware("sometimes")  # type: ignore[arg-type]


async def test_a_policy_that_fails_fast_is_not_waited_for(engine: Scripted) -> None:
    """`x-should-retry: false` goes through at once."""
    with pytest.raises(PoolSaturatedError) as refused:
        await run(Refusing(engine, 1, "fast").agent(BackpressureMiddleware()), "hi")
    assert not refused.value.should_retry
    assert len(engine.bodies) == 1


async def test_an_interrupt_hands_back_with_the_time_to_return(engine: Scripted) -> None:
    """The driver sees why and when; resumed, the call is made again."""
    agent = Refusing(engine, 1).agent(BackpressureMiddleware("interrupt"), checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    await run(agent, "hi", config)
    (waiting,) = (await agent.aget_state(config)).interrupts
    assert (waiting.value["type"], waiting.value["retry_after"], waiting.value["arm"]) == ("pool_saturated", 7, "floor")
    final = await agent.ainvoke(Command(resume=True), config)
    assert final["messages"][-1].text == "The keel lies below."


async def enforced(world: Fleet, pool: int | None = None) -> None:
    """New sessions need a free slot; the floor is never reached."""
    policy: dict[str, Any] = {"mode": "enforced", "target_tps_per_session": 0.001, "settle_tokens": 1, "settle_max_ms": 50}
    await asyncio.to_thread(lambda: world.client.set_admission(pool, **policy))


async def test_eight_agents_on_two_slots_all_finish(tmp_path: Path) -> None:
    """Two are let in and held at work until others were refused: with the middleware all eight answers come."""
    async with fleet(tmp_path, n_slots=2) as world, world.time_passing():

        async def asleep(_seconds: float) -> None:
            world.proxy.engine.go()  # somebody was refused
            await asyncio.sleep(0.01)

        middleware = [BackpressureMiddleware(asleep=asleep, max_wait_s=1e6), PoolMiddleware(world.client, end_session="all")]
        agent = create_agent(world.model, [], system_prompt="You are a terse sailor.", middleware=middleware)
        await run(agent, "make the pool", {"configurable": {"thread_id": "first"}})
        await enforced(world, (await world.listed())[0]["pool_id"])
        world.proxy.engine.hold()
        configs = [{"configurable": {"thread_id": str(n)}} for n in range(8)]
        finals = await asyncio.gather(*(run(agent, "hi", config) for config in configs))
        assert [final["messages"][-1].text for final in finals] == ["done."] * 8
        refused = await asyncio.to_thread(lambda: world.client.decisions(limit=1000).decisions)
        assert {one["arm"] for one in refused if one["outcome"] == "rejected"} <= {"slots", "settling", "floor"}
        assert any(one["outcome"] == "rejected" for one in refused)


async def test_a_gate_never_overshoots_the_slots(tmp_path: Path) -> None:
    """Eight tasks on two slots through the gate: never more than two at once, and nobody is ever refused."""
    async with fleet(tmp_path, n_slots=2) as world, world.time_passing():
        await enforced(world)
        at_work, most = 0, 0

        async def work(sent: dict[str, Any]) -> dict[str, Any]:
            nonlocal at_work, most
            at_work, most = at_work + 1, max(most, at_work + 1)
            reply = await world.model.ainvoke("hi", session_id=sent["task"])
            at_work -= 1
            return {"done": [sent["task"]], "texts": [reply.text]}

        class State(PoolState, total=False):
            tasks: list[str]
            done: Annotated[list[str], operator.add]
            texts: Annotated[list[str], operator.add]

        async def asleep(_seconds: float) -> None:
            await asyncio.sleep(0.01)

        builder = StateGraph(State).add_node("worker", work)
        todo = [str(n) for n in range(8)]
        add_capacity_gate(
            builder, world.client, todo=lambda state: [t for t in state["tasks"] if t not in state.get("done", [])],
            patience=Patience(1e6, asleep=asleep),
        )  # fmt: skip
        final = await builder.add_edge(START, "gate").compile().ainvoke({"tasks": todo})
        assert sorted(final["done"]) == todo
        assert final["texts"] == ["done."] * 8
        assert most <= 2
        decided = await asyncio.to_thread(lambda: world.client.decisions(limit=1000).decisions)
        assert {one["outcome"] for one in decided} == {"admitted"}
