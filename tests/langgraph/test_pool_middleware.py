"""PoolMiddleware on the real proxy: bases, forks, sessions, divergence, pools that are gone, and what is left in the end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware.types import AgentMiddleware
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from opencoti_langgraph import PoolMiddleware, late_context
from opencoti_langgraph.prefix import Divergence
from tests.fakes.fake_records import EngineFaultError
from tests.fakes.scripted_chat import Answer
from tests.langgraph.fleet import Fleet, fleet, run
from tests.langgraph.sailing import ascend, dive

SYSTEM = "You are a terse sailor who knows ships and harbours."


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as world:
        yield world


@pytest.fixture(params=["sync", "async"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def thread(name: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": name}}


async def test_agents_of_one_kind_share_a_base(world: Fleet, way: str) -> None:
    """Two agents with the same system prompt and tools, in any order: one pool, both served from it, each with its session."""
    for number, tools in enumerate(([dive, ascend], [ascend, dive])):
        agent = create_agent(world.model, tools, system_prompt=SYSTEM, middleware=[PoolMiddleware(world.client)])
        reply = (await run(agent, f"question {number}", thread(str(number)), way=way))["messages"][-1]
        assert reply.usage_metadata["input_token_details"]["cache_read"] > 10
        assert reply.response_metadata["cached_prefix_tokens"] > 10
    assert len(await world.tree()) == 1
    assert len({body["session_id"] for body in world.asked}) == 2


async def test_other_tools_are_another_base(world: Fleet) -> None:
    """Journey B: what is sent differs, so do the pools."""
    for tools in ([dive], [dive, ascend]):
        await run(create_agent(world.model, tools, system_prompt=SYSTEM, middleware=[PoolMiddleware(world.client)]), "hi")
    assert len(await world.tree()) == 2


async def test_a_conversation_keeps_pool_and_session(world: Fleet, way: str) -> None:
    """Turns of one thread: one pool, one session; a second process goes on where the first one was."""
    saver = InMemorySaver()
    for text in ("one", "two", "three"):
        middleware = PoolMiddleware(world.client)  # as new
        agent = create_agent(world.model, [dive], system_prompt=SYSTEM, middleware=[middleware], checkpointer=saver)
        await run(agent, text, thread("t"), way=way)
    assert len({(body["pool_id"], body["session_id"]) for body in world.asked}) == 1
    assert len(await world.tree()) == 1


async def test_an_explicit_pool_is_left_alone(world: Fleet) -> None:
    """Who chose a pool for the call keeps it; other models are not touched."""
    pool = world.client
    made = await asyncio.to_thread(lambda: pool.create_pool(prompt="something"))

    class Chooses(AgentMiddleware):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await handler(request.override(model_settings={"pool_id": made.pool_id}))

    agent = create_agent(world.model, [], system_prompt=SYSTEM, middleware=[Chooses(), PoolMiddleware(world.client)])
    await run(agent, "hi")
    assert world.asked[-1]["pool_id"] == made.pool_id
    assert len(await world.tree()) == 1


async def test_without_a_system_prompt_there_is_nothing_to_share(world: Fleet) -> None:
    """The request runs without a pool, with its session."""
    await run(create_agent(world.model, [], middleware=[PoolMiddleware(world.client)]), "hi")
    assert "pool_id" not in world.asked[-1]
    assert world.asked[-1]["session_id"]


async def test_a_pool_that_cannot_be_made_costs_nothing(tmp_path: Path) -> None:
    """No sequence ids: the agent runs without a pool."""
    async with fleet(tmp_path, max_pools=1) as world:
        pinned = await asyncio.to_thread(lambda: world.client.create_pool(prompt="something else"))
        await asyncio.to_thread(lambda: world.client.pin_pool(pinned.pool_id))
        agent = create_agent(world.model, [], system_prompt=SYSTEM, middleware=[PoolMiddleware(world.client)])
        assert (await run(agent, "hi"))["messages"][-1].text == "done."


@pytest.mark.parametrize("how", ["released", "expired"])
async def test_a_base_that_is_gone_is_made_anew(world: Fleet, way: str, how: str) -> None:
    """Between two turns somebody released it, or its lease ran out: the next turn has a pool again."""
    agent = create_agent(
        world.model, [dive], system_prompt=SYSTEM, middleware=[PoolMiddleware(world.client)], checkpointer=InMemorySaver()
    )
    await run(agent, "one", thread("t"), way=way)
    (old,) = await world.listed()
    if how == "released":
        await asyncio.to_thread(world.client.release_pool, old["pool_id"], recursive=False)
    else:
        await world.proxy.api.delete("/polykv/sessions", params={"session_id": world.asked[0]["session_id"]})
        await world.later(4000)
        assert await world.listed() == []
    await run(agent, "two", thread("t"), way=way)
    (new,) = await world.listed()
    assert new["pool_id"] != old["pool_id"]
    assert world.asked[-1]["pool_id"] == new["pool_id"]


async def test_f054_a_stable_prefix_stays_and_a_moving_one_is_named(world: Fleet, way: str) -> None:
    """Five turns, tools bound in another order each time, a clock and what was retrieved at the end of the last turn: one pool in
    all of them, and the cached count covers it. The same clock in the system prompt is named, with part and position, and makes no
    pool for each turn.
    """
    told: list[tuple[str, Divergence]] = []

    class Late(AgentMiddleware):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(request.override(messages=late_context(request.messages, f"It is {len(world.asked)} o'clock.")))

        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await handler(request.override(messages=late_context(request.messages, f"It is {len(world.asked)} o'clock.")))

    saver = InMemorySaver()
    for turn in range(5):
        tools = [dive, ascend] if turn % 2 else [ascend, dive]
        middleware = [Late(), PoolMiddleware(world.client, on_divergence=lambda *what: told.append(what))]
        agent = create_agent(world.model, tools, system_prompt=SYSTEM, middleware=middleware, checkpointer=saver)
        reply = (await run(agent, f"turn {turn}", thread("t"), way=way))["messages"][-1]
        (pool,) = await world.listed()
        assert reply.response_metadata["cached_prefix_tokens"] >= pool["prefix_len"] - 1
    assert not told

    saver = InMemorySaver()
    for turn in range(5):
        middleware = [PoolMiddleware(world.client, on_divergence=lambda *what: told.append(what))]
        prompt = f"{SYSTEM} It is {turn} o'clock."
        agent = create_agent(world.model, [dive], system_prompt=prompt, middleware=middleware, checkpointer=saver)
        reply = (await run(agent, f"turn {turn}", thread("u"), way=way))["messages"][-1]
    assert len(await world.listed()) == 2
    assert [(where.part, where.position is not None) for _, where in told] == [("system", True)] * 4
    assert reply.response_metadata["prefix_divergence"]["part"] == "system"


async def test_prompts_that_change_without_a_thread_make_few_pools(world: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """Every run is new and has another system prompt: after a few pools the last one serves, and the log says why, without text."""
    middleware = PoolMiddleware(world.client)
    for turn in range(8):
        agent = create_agent(world.model, [], system_prompt=f"{SYSTEM} It is {turn} secret.", middleware=[middleware])
        await run(agent, "hi")
    assert len(await world.listed()) == 4
    assert "another system prompt" in caplog.text
    assert "secret" not in caplog.text


async def test_a_child_that_is_given_a_fork_uses_it(world: Fleet, way: str) -> None:
    """Tool-wrapped: the fork goes in as `pool_id`; parent and child each end on their own pool, and the child's session is gone."""
    child = create_agent(world.model, [], system_prompt=SYSTEM, middleware=[PoolMiddleware(world.client)], name="child")

    @tool
    def research(question: str) -> str:
        """Ask a child."""
        fork = world.client.create_pool(messages=[{"role": "system", "content": SYSTEM}], name="given")
        return child.invoke({"messages": [HumanMessage(question)], "pool_id": fork.pool_id})["messages"][-1].text

    world.say = lambda body: (
        Answer(calls=[("research", {"question": "depth"})])
        if body.get("tools") and body["messages"][-1]["role"] == "user"
        else Answer("done.")
    )
    agent = create_agent(world.model, [research], system_prompt=SYSTEM, middleware=[PoolMiddleware(world.client)])
    await run(agent, "go", thread("t"), way=way)
    pools = {pool["name"]: pool["pool_id"] for pool in await world.listed()}
    parent, inner, again = world.asked
    assert inner["pool_id"] == pools["given"]
    assert parent["pool_id"] == again["pool_id"] != inner["pool_id"]
    assert parent["session_id"] != inner["session_id"]
    assert await world.sessions() == [parent["session_id"]]


async def test_children_of_children_of_children(world: Fleet, way: str) -> None:
    """Depth four, each level with its own system prompt: a base for each, sessions of children gone in the end."""

    def level(n: int) -> Any:
        middleware = [PoolMiddleware(world.client)]
        if n == 0:
            return create_agent(world.model, [], system_prompt=f"{SYSTEM} Level {n}.", middleware=middleware)
        below = level(n - 1)

        @tool
        def deeper(question: str) -> str:
            """Ask one below."""
            return below.invoke({"messages": [HumanMessage(question)]})["messages"][-1].text

        return create_agent(world.model, [deeper], system_prompt=f"{SYSTEM} Level {n}.", middleware=middleware)

    world.say = lambda body: (
        Answer(calls=[("deeper", {"question": "on"})])
        if body.get("tools") and body["messages"][-1]["role"] == "user"
        else Answer("done.")
    )
    await run(level(3), "go", thread("t"), way=way)
    assert len(await world.listed()) == 4
    assert len({body["session_id"] for body in world.asked}) == 4
    assert await world.sessions() == [world.asked[0]["session_id"]]


async def test_what_is_left_after_an_error_goes_by_its_lease(world: Fleet, way: str) -> None:
    """`after_agent` does not run when a model fails; then leases clean up, and nothing is pinned."""
    agent = create_agent(world.model, [dive], system_prompt=SYSTEM, middleware=[PoolMiddleware(world.client)])

    fault = EngineFaultError(500, "server_error", "the engine fell over")
    world.proxy.engine.faults["complete"] = deque([fault])
    with pytest.raises(openai.InternalServerError):
        await run(agent, "hi", thread("t"), way=way)
    await world.later(700)  # its session first
    await world.later(4000)
    assert await world.listed() == []


async def test_all_sessions_end_when_asked_to(world: Fleet, way: str) -> None:
    """`end_session`: all, or none, also of the outermost agent."""
    for what, left in (("all", 0), ("none", 1)):
        agent = create_agent(
            world.model, [], system_prompt=SYSTEM, middleware=[PoolMiddleware(world.client, end_session=what)], name=what
        )
        await run(agent, "hi", thread(what), way=way)
        assert len(await world.sessions()) == left
    with pytest.raises(ValueError, match="some"):
        PoolMiddleware(world.client, end_session="some")
