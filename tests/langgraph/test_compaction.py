"""Compaction on the real proxy: when, in what order, what is left after a crash at each step, and time travel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from opencoti_langgraph import (
    CompactionMiddleware,
    CompactionNode,
    CompactionState,
    OpencotiChatModel,
    PoolClient,
    PoolKeeper,
    PoolMiddleware,
    Trigger,
)
from opencoti_langgraph.keeper import Held
from tests.fakes.scripted_chat import Answer
from tests.langgraph.fleet import Fleet, fleet, run
from tests.langgraph.sailing import dive

SYSTEM = "You are a terse sailor who knows ships and harbours."
ALWAYS = Trigger(pressure=0.0, min_messages=6)
KEEP = ("messages", 2)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path) as world:
        world.say = lambda body: Answer("in short: ships." if "tools" not in body else f"reply {len(world.asked)}.")
        yield world


@pytest.fixture(params=["sync", "async"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def agent(world: Fleet, saver: InMemorySaver, client: PoolClient | None = None, **options: Any) -> Any:
    """As in a process of its own."""
    pools = PoolMiddleware(client or world.client)
    compaction = CompactionMiddleware(world.model, pools, trigger=options.pop("trigger", ALWAYS), keep=KEEP)
    return create_agent(world.model, [dive], system_prompt=SYSTEM, middleware=[compaction, pools], checkpointer=saver, **options)


THREAD: Any = {"configurable": {"thread_id": "t"}}


def reply(left: int | None) -> AIMessage:
    return AIMessage("x", response_metadata={"headroom": {"sessions": None, "ctx_tokens": left}})


@pytest.mark.parametrize(
    ("pressure", "left", "n", "fires"),
    [
        (0.9, None, 6, True),
        (0.7, None, 6, False),
        (None, 100, 6, True),
        (0.0, 600, 6, False),
        (1.0, 0, 3, False),
        (None, None, 6, False),
    ],
)
def test_when_it_is_time(pressure: float | None, left: int | None, n: int, fires: bool) -> None:
    """High pressure, or little left in the context of the last reply; never for a history that is short already."""
    messages: list[AnyMessage] = [*[HumanMessage("x")] * (n - 1), reply(left)]
    assert Trigger().fires(messages, pressure) is fires


@pytest.mark.parametrize(("n_words", "fires"), [(10, False), (400, True)])
def test_what_came_since_the_last_reply_counts(n_words: int, fires: bool) -> None:
    """A long result of a tool fills the context before any reply can say so."""
    messages: list[AnyMessage] = [*[HumanMessage("x")] * 4, reply(900), ToolMessage("keel " * n_words, tool_call_id="c")]
    assert Trigger().fires(messages, None) is fires


async def test_a_long_history_becomes_a_branch_of_the_base(world: Fleet, way: str) -> None:
    """The summary is made with the old pool; the new branch hangs below the base; state names it in the same step; cells go down
    with each later swap, since the branch before is released.
    """
    saver = InMemorySaver()
    built = agent(world, saver)
    for turn in range(8):
        final = await run(built, f"turn {turn}", THREAD, way=way)
    summaries = [body for body in world.asked if "tools" not in body]
    assert len(summaries) >= 2
    assert len(final["messages"]) < 12
    state = built.get_state(THREAD).values
    tree = {pool["pool_id"]: pool for pool in await world.listed()}
    assert tree[state["pool_id"]]["parent"] == state["pool_prefix"]["path"][0]
    assert len(tree) == 2
    assert state["pool_retired"] == []
    assert summaries[0]["pool_id"] == state["pool_prefix"]["path"][0]
    assert summaries[1]["pool_id"] not in tree
    assert final["messages"][-1].response_metadata["cached_prefix_tokens"] >= tree[state["pool_id"]]["prefix_len"] - 1


async def test_the_old_branch_lives_until_the_next_step(world: Fleet) -> None:
    """In the step that swaps, the old branch is only noted; it is released after the model has answered on the new one."""
    saver = InMemorySaver()
    built = agent(world, saver)
    for turn in range(6):
        await run(built, f"turn {turn}", THREAD)
    noted = [
        (shot.values.get("pool_retired"), shot.values.get("pool_id"))
        for shot in built.get_state_history(THREAD)
        if shot.values.get("pool_retired")
    ]
    assert noted
    assert all(new not in old for old, new in noted)


async def test_another_process_compacts_as_well(world: Fleet, way: str) -> None:
    """A process that did not make the pools: its branch hangs below the same base, and holds the short history."""
    saver = InMemorySaver()
    for turn in range(4):
        final = await run(agent(world, saver), f"turn {turn}", THREAD, way=way)
    assert any("tools" not in body for body in world.asked)
    base, branch = await world.listed()
    assert branch["parent"] == base["pool_id"]
    assert final["messages"][-1].response_metadata["cached_prefix_tokens"] == branch["prefix_len"] > base["prefix_len"]


async def test_no_figures_no_compaction_no_failure(world: Fleet) -> None:
    """A proxy that does not answer capacity never fails an agent."""
    nowhere = PoolClient(
        http_client=httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(503)), base_url="http://x")
    )
    built = agent(world, InMemorySaver(), nowhere)
    for turn in range(5):
        final = await run(built, f"turn {turn}", THREAD)
    assert len(final["messages"]) == 10


async def test_time_travel_to_a_released_pool_goes_to_its_ancestor(world: Fleet, way: str) -> None:
    """An old checkpoint names a branch that is gone: the run goes on from the base, and does not fail."""
    saver = InMemorySaver()
    built = agent(world, saver)
    for turn in range(8):
        await run(built, f"turn {turn}", THREAD, way=way)
    alive = {pool["pool_id"] for pool in await world.listed()}
    old = next(
        shot
        for shot in built.get_state_history(THREAD)
        if shot.values.get("pool_id") not in {None, *alive} and shot.next and shot.next[0] == "model"
    )
    again = await asyncio.to_thread(built.invoke, None, old.config) if way == "sync" else await built.ainvoke(None, old.config)
    assert again["messages"][-1].response_metadata["pool_id"] in alive
    keeper = PoolKeeper(world.client)
    held = Held.of(old.values)
    assert held is not None
    assert await asyncio.to_thread(keeper.live, held) in alive


def plain_graph(world: Fleet, saver: InMemorySaver | None, **options: Any) -> Any:
    """A StateGraph with a compaction node before the model."""
    node = CompactionNode(world.model, world.client, system=SYSTEM, trigger=ALWAYS, keep=KEEP, **options)

    def ask(state: Any) -> dict[str, Any]:
        bound = world.model.bind(**({"pool_id": state["pool_id"]} if state.get("pool_id") else {}))
        return {"messages": [bound.invoke([SystemMessage(SYSTEM), *state["messages"]])]}

    builder = StateGraph(CompactionState).add_node("compact", RunnableLambda(node, afunc=node.acall)).add_node("ask", ask)
    return builder.add_edge(START, "compact").add_edge("compact", "ask").compile(checkpointer=saver)


async def test_a_node_compacts_plain_graphs(world: Fleet, way: str) -> None:
    """With a pool of one's own: the branch is made below that pool's parent, the old pool goes one step later."""
    world.say = lambda body: Answer(f"reply {len(world.asked)}.")
    head = {"role": "system", "content": SYSTEM}
    base = await world.proxy.pool(messages=[head], name="base")
    forked = await world.proxy.api.post(
        "/polykv/pools/base/fork", json={"messages": [head, {"role": "user", "content": "turn 0"}], "name": "work"}
    )
    built = plain_graph(world, InMemorySaver())
    for turn in range(5):
        given = {"pool_id": forked.json()["pool_id"]} if turn == 0 else {}
        await run(built, f"turn {turn}", THREAD, way=way, **given)
    tree = {pool["pool_id"]: pool for pool in await world.listed()}
    state = built.get_state(THREAD).values
    assert forked.json()["pool_id"] not in tree
    assert tree[state["pool_id"]]["parent"] == base["pool_id"]
    assert len(state["messages"]) < 10


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::langgraph.warnings.LangGraphDeprecatedSinceV10")
async def test_as_a_pre_model_hook_it_never_shows_the_model_an_old_list(world: Fleet) -> None:
    """Both keys come back every time, so the loop of tool calls ends."""
    from langgraph.prebuilt import create_react_agent  # noqa: PLC0415 # deprecated, and supported here
    from langgraph.prebuilt.chat_agent_executor import AgentState as ReactState  # noqa: PLC0415

    class State(ReactState):
        pool_id: Any
        pool_prefix: Any
        pool_retired: Any
        llm_input_messages: Any

    calls = iter(range(3))

    def say(body: dict[str, Any]) -> Answer:
        if "tools" not in body:
            return Answer("in short.")
        return Answer(calls=[("dive", {"depth": 3})]) if next(calls, None) is not None else Answer("done.")

    world.say = say
    node = CompactionNode(
        world.model, world.client, tools=[dive], trigger=Trigger(pressure=0.0, min_messages=5), keep=KEEP, pre_model_hook=True
    )
    built = create_react_agent(world.model, [dive], pre_model_hook=node, state_schema=State)
    final = await asyncio.to_thread(built.invoke, {"messages": [HumanMessage("go")]}, {"recursion_limit": 40})
    assert final["messages"][-1].text == "done."
    assert any("tools" not in body for body in world.asked)


def test_calls_and_their_results_stay_together() -> None:
    """What LangChain's summariser keeps never begins with a result whose call was left out."""
    from opencoti_langgraph.compaction import Summariser  # noqa: PLC0415

    seen: list[Any] = []

    class Fake(OpencotiChatModel):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            from langchain_core.outputs import ChatGeneration, ChatResult  # noqa: PLC0415

            seen.append((messages, self.pool_id))
            return ChatResult(generations=[ChatGeneration(message=AIMessage("in short."))])

    call = {"name": "dive", "args": {"depth": 3}, "id": "c", "type": "tool_call"}
    history: list[AnyMessage] = [
        HumanMessage("a"),
        AIMessage("b"),
        HumanMessage("c"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("at 3", tool_call_id="c"),
    ]
    short = Summariser(Fake(base_url="http://127.0.0.1:9/v1"), ("messages", 1)).short(history, "warm")
    assert short is not None
    assert [type(message) for message in short] == [HumanMessage, AIMessage, ToolMessage]
    assert all(message.id for message in short)
    assert seen[0][1] == "warm"
