"""F054: what changes from turn to turn comes after what does not, tools in one order: the whole pool is shared in every turn."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages

from opencoti_langgraph import OpencotiChatModel, PoolClient, PoolMiddleware, late_context
from tests.langgraph.agents import SYSTEM, clients, give_back, model_of
from tests.langgraph.conftest import no_traces  # noqa: F401 - pytest finds the fixture here
from tests.langgraph.sailing import ascend, dive

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, engine_path: Path) -> Iterator[PoolClient]:
    with clients(engine_path, tmp_path_factory.mktemp("f054")) as client:
        yield client


@pytest.fixture
def model(client: PoolClient) -> Iterator[OpencotiChatModel]:
    yield model_of(client)
    give_back(client)


def test_every_turn_is_served_from_one_pool(client: PoolClient, model: OpencotiChatModel) -> None:
    """Five turns, tools bound in another order each time: one pool with tools in it, and all of it is shared in every turn."""
    saver = InMemorySaver()
    for turn in range(5):
        tools = [dive, ascend] if turn % 2 else [ascend, dive]
        agent = create_agent(model, tools, system_prompt=SYSTEM, middleware=[PoolMiddleware(client)], checkpointer=saver)
        final = agent.invoke({"messages": [HumanMessage(f"turn {turn}")]}, {"configurable": {"thread_id": "t"}})
        (pool,) = client.pools().pools
        assert final["messages"][-1].response_metadata["cached_prefix_tokens"] == pool.prefix_len
    assert "dive" in client.pool_text(pool.pool_id).text


def test_a_graph_of_three_nodes_keeps_its_prefix(client: PoolClient, model: OpencotiChatModel) -> None:
    """Five turns: what was retrieved and a clock change each time and go last, tools come in another order: all of the pool is
    shared in all turns. A clock in the system prompt ends it there, and the proxy says at which token.
    """

    class State(TypedDict, total=False):
        messages: Annotated[list[Any], add_messages]
        found: str
        shared: Annotated[list[int], operator.add]

    pool = client.create_pool(**model.prompt_body([SystemMessage(SYSTEM)], [dive, ascend]))

    def retrieve(state: State) -> State:
        return {"found": f"note {len(state['messages']) * 7}, at {len(state['messages'])} o'clock"}

    def ask(state: State) -> State:
        tools = [dive, ascend] if len(state["messages"]) % 4 else [ascend, dive]
        turns = [SystemMessage(SYSTEM), *late_context(state["messages"], state["found"])]
        return {"messages": [model.bind_tools(tools).invoke(turns, pool_id=pool.pool_id, session_id="three")]}

    def note(state: State) -> State:
        return {"shared": [state["messages"][-1].response_metadata["cached_prefix_tokens"]]}

    builder: Any = StateGraph(State)
    for node in (retrieve, ask, note):
        builder.add_node(node)
    builder.add_edge(START, "retrieve").add_edge("retrieve", "ask").add_edge("ask", "note")
    graph = builder.compile(checkpointer=InMemorySaver())
    for turn in range(5):
        final = graph.invoke({"messages": [HumanMessage(f"turn {turn}")]}, {"configurable": {"thread_id": "three"}})
    assert final["shared"] == [pool.prefix_len] * 5

    moved = model.prompt_body([SystemMessage(f"It is noon. {SYSTEM}"), HumanMessage("hi")], [dive, ascend])
    (match,) = client.match({**moved, "pool_id": pool.pool_id}).prompts
    assert match.first_differing_position is not None
    assert match.first_differing_position < 8
