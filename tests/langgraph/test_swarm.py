"""langgraph-swarm: agents that hand over to each other on one list of messages."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph_swarm import create_handoff_tool, create_swarm

from opencoti_langgraph import PoolMiddleware
from tests.fakes.scripted_chat import Answer
from tests.langgraph.fleet import Fleet, fleet, run

SYSTEM = "You are a terse sailor who knows ships and harbours."
THREAD: Any = {"configurable": {"thread_id": "t"}}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as world:
        world.say = handing_over
        yield world


def handing_over(body: dict[str, Any]) -> Answer:
    """Alice to Bob, Bob to Alice, and then an answer."""
    turn = itertools.takewhile(lambda one: one["role"] != "user", reversed(body["messages"]))
    n_handed = sum(one["role"] == "tool" for one in turn)
    return Answer(calls=[(["transfer_to_bob", "transfer_to_alice"][n_handed], {})]) if n_handed < 2 else Answer("done.")


def swarm(world: Fleet, **options: Any) -> Any:
    agents = [
        create_agent(
            world.model,
            [create_handoff_tool(agent_name=other)],
            system_prompt=f"{SYSTEM} You are {name}.",
            middleware=[PoolMiddleware(world.client, **options)],
            name=name,
        )
        for name, other in (("alice", "bob"), ("bob", "alice"))
    ]
    return create_swarm(agents, default_active_agent="alice").compile(checkpointer=InMemorySaver())


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_two_hand_offs(world: Fleet, way: str) -> None:
    """A base and a session for each agent, whichever way control goes; back at Alice her own cells are found again."""
    graph = swarm(world)
    for turn in range(2):
        final = await run(graph, f"question {turn}", THREAD, way=way)
        assert final["messages"][-1].text == "done."
        assert final["active_agent"] == "alice"
    alice, bob, *_ = asked = [(body["pool_id"], body["session_id"]) for body in world.asked]
    assert asked == [alice, bob, alice, alice, bob, alice]
    assert alice[0] != bob[0]
    assert alice[1] != bob[1]
    assert set((await world.tree()).values()) == {None}
    (base,) = [pool for pool in await world.listed() if pool["pool_id"] == alice[0]]
    usage = final["messages"][-1].usage_metadata
    assert usage["input_token_details"]["cache_read"] > base["prefix_len"] + 10
    assert sorted(await world.sessions()) == sorted({alice[1], bob[1]})


async def test_what_a_swarm_leaves_goes_by_itself(world: Fleet) -> None:
    """An agent that hands over is never told that it has finished: its session ends by the proxy's limit, its base by its lease."""
    await run(swarm(world), "question", THREAD)
    for seconds in (700, 4000):
        await world.later(seconds)
    assert await world.sessions() == []
    assert await world.listed() == []
