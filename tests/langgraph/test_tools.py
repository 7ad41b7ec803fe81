"""Pools as tools: what a model reads, small answers, and what may be changed only on request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode

from opencoti_langgraph import PoolClient, PoolState, make_pool_tools
from opencoti_langgraph.tools import CHANGING, READING
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, relayed, rig


class State(PoolState, total=False):
    messages: Annotated[list[Any], add_messages]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Rig, PoolClient]]:
    async with rig(tmp_path, FakeEngine()) as proxy, relayed(proxy) as (_, http):
        with PoolClient(str(http.base_url)) as client:
            yield proxy, client


async def use(tools: list[Any], name: str, /, **args: Any) -> Any:
    """Call a tool as an agent does, through a ToolNode in a graph."""
    builder = StateGraph(State).add_node("tools", ToolNode(tools)).add_edge(START, "tools")
    call = {"name": name, "args": args, "id": "c1", "type": "tool_call"}
    final = await builder.compile().ainvoke({"messages": [AIMessage("", tool_calls=[call])]})
    return final, final["messages"][-1]


def test_only_reading_unless_more_is_allowed() -> None:
    """The default tools change nothing; an unknown name is refused."""
    with PoolClient() as client:
        assert {tool.name for tool in make_pool_tools(client)} == READING
        assert {tool.name for tool in make_pool_tools(client, allow={"fork_pool", "capacity"})} == {"fork_pool", "capacity"}
        with pytest.raises(ValueError, match="explode"):
            make_pool_tools(client, allow={"explode"})


def test_a_model_reads_what_each_tool_and_argument_is_for() -> None:
    """Descriptions are there for tools and all arguments, and what is injected is not shown."""
    with PoolClient() as client:
        for tool in make_pool_tools(client, allow=READING | CHANGING):
            function = convert_to_openai_tool(tool)["function"]
            assert len(function["description"]) > 20
            assert "runtime" not in function["parameters"]["properties"]
            assert all(part.get("description") for part in function["parameters"]["properties"].values()), tool.name


async def test_an_agent_makes_forks_and_releases(served: tuple[Rig, PoolClient]) -> None:
    """All that changes, by an agent's calls; the pools it made have a time to live."""
    proxy, client = served
    tools = make_pool_tools(client, allow=READING | CHANGING)
    _, made = await use(tools, "create_pool", name="base", context="one two three four")
    assert json.loads(made.content)["tokens"] > 4
    _, forked = await use(tools, "fork_pool", pool="base", name="more", context="one two three five six")
    assert json.loads(forked.content)["parent"] == json.loads(made.content)["pool"]
    assert all(pool["ttl_s"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"])
    _, pinned = await use(tools, "pin_pool", pool="more", seconds=60)
    assert json.loads(pinned.content)["pinned"]
    await use(tools, "unpin_pool", pool="more")
    _, released = await use(tools, "release_pool", pool="more")
    assert json.loads(released.content)["released"]
    _, status = await use(tools, "pool_status")
    assert [json.loads(line)["name"] for line in status.content.splitlines()] == ["base"]


async def test_an_error_is_an_answer(served: tuple[Rig, PoolClient]) -> None:
    """The agent reads what went wrong; the graph goes on."""
    _, answer = await use(make_pool_tools(served[1]), "pool_status", pool="nowhere")
    assert isinstance(answer, ToolMessage)
    assert answer.content.startswith("error:")


async def test_what_was_made_can_go_into_the_state(served: tuple[Rig, PoolClient]) -> None:
    """`into_state` writes `pool_id` beside the answer."""
    tools = make_pool_tools(served[1], allow={"create_pool"}, into_state=True)
    final, made = await use(tools, "create_pool", name="base", context="one two three")
    assert final["pool_id"] == json.loads(made.content)["pool"]


async def test_speeds_and_room_in_a_few_words(served: tuple[Rig, PoolClient]) -> None:
    """Two short lines, without what is not known."""
    tools = make_pool_tools(served[1])
    _, room = await use(tools, "capacity")
    assert json.loads(room.content)["can_start"] == 4
    _, speeds = await use(tools, "session_tps")
    assert len(speeds.content) < 100
    _, empty = await use(tools, "pool_status")
    assert empty.content == "none"
