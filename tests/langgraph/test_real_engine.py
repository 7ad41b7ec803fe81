"""The package on the real engine through the real proxy, with a tiny model: counts that a fake could only claim."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages

from opencoti_langgraph import (
    BackpressureMiddleware,
    CompactionMiddleware,
    ContextExceededError,
    OpencotiChatModel,
    PoolClient,
    PoolMiddleware,
    Trigger,
    late_context,
)
from tests.langgraph.real import N_CTX, served_tiny

pytestmark = pytest.mark.engine
SYSTEM = "You are a terse assistant who knows a great deal about ships, harbours and the open sea."


@tool
def dive(depth: int) -> str:
    """Go down."""
    return f"at {depth}"


@tool
def ascend(height: int) -> str:
    """Go up."""
    return f"at {height}"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, engine_path: Path) -> Iterator[PoolClient]:
    with served_tiny(engine_path, tmp_path_factory.mktemp("langgraph")) as served, PoolClient(served.url) as client:
        yield client


@pytest.fixture
def model(client: PoolClient) -> Iterator[OpencotiChatModel]:
    yield OpencotiChatModel(base_url=f"{client.base_url}/v1", max_tokens=6, temperature=0, n_ctx=N_CTX)
    for session in client.sessions().sessions:
        if session.session_id:
            client.end_session(session.session_id)
    for pool in client.pools().pools:
        if pool.parent is None:
            client.release_pool(pool.pool_id, recursive=True)


def cached(message: Any) -> int:
    return int(message.usage_metadata["input_token_details"]["cache_read"])


def test_f050_streamed_usage_equals_the_whole_reply_s(client: PoolClient, model: OpencotiChatModel) -> None:
    """Counts of prompt, answer and cache, once each; our session's totals agree, and the server's count beforehand too."""
    pool = client.create_pool(messages=[{"role": "system", "content": SYSTEM}])
    bound = model.bind(pool_id=pool.pool_id, session_id="usage")
    ask = [SystemMessage(SYSTEM), HumanMessage("Where is the keel?")]
    whole = bound.invoke(ask)
    streamed: AIMessageChunk | None = None
    for chunk in bound.stream(ask):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert whole.usage_metadata is not None
    assert streamed.usage_metadata is not None
    assert (streamed.text, streamed.usage_metadata["input_tokens"]) == (whole.text, whole.usage_metadata["input_tokens"])
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] == 6
    assert cached(whole) >= pool.prefix_len
    assert whole.response_metadata["cached_prefix_tokens"] == pool.prefix_len
    assert model.get_num_tokens_from_messages(ask) == whole.usage_metadata["input_tokens"]
    assert client.session("usage").n_turns == 2
    told = streamed.response_metadata
    assert (told["pool_id"], told["session_id"]) == (pool.pool_id, "usage")
    assert told["timings"]["predicted_n"] == 6
    assert told["headroom"]["ctx_tokens"] > 0


def test_f054_every_turn_is_served_from_one_pool(client: PoolClient, model: OpencotiChatModel) -> None:
    """Five turns, tools bound in another order each time: one pool with tools in it, and all of it is shared in every turn."""
    saver = InMemorySaver()
    for turn in range(5):
        tools = [dive, ascend] if turn % 2 else [ascend, dive]
        agent = create_agent(model, tools, system_prompt=SYSTEM, middleware=[PoolMiddleware(client)], checkpointer=saver)
        final = agent.invoke({"messages": [HumanMessage(f"turn {turn}")]}, {"configurable": {"thread_id": "t"}})
        (pool,) = client.pools().pools
        assert final["messages"][-1].response_metadata["cached_prefix_tokens"] == pool.prefix_len
    assert "dive" in client.pool_text(pool.pool_id).text


def test_f054_a_graph_of_three_nodes_keeps_its_prefix(client: PoolClient, model: OpencotiChatModel) -> None:
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


def test_a_turn_goes_back_as_it_was_generated(client: PoolClient, model: OpencotiChatModel) -> None:
    """The second turn's prompt begins with the first one's prompt and answer, token by token: its own cells are found again."""
    first: list[Any] = [SystemMessage(SYSTEM), HumanMessage("Where is the keel?")]
    answer = model.invoke(first, session_id="history")
    second = model.invoke([*first, answer, HumanMessage("And the mast?")], session_id="history")
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata is not None
    assert cached(second) >= answer.usage_metadata["total_tokens"] - 2


def test_eight_agents_compute_their_prefix_once(client: PoolClient, model: OpencotiChatModel) -> None:
    """Eight at once on four slots: the system prompt and tools are computed by the pool alone, each agent computes its own rest."""
    middleware = [BackpressureMiddleware(), PoolMiddleware(client, end_session="all")]
    agent = create_agent(model, [dive], system_prompt=SYSTEM, middleware=middleware)

    async def fleet() -> list[Any]:
        runs = [agent.ainvoke({"messages": [HumanMessage(f"part {n}")]}, {"configurable": {"thread_id": str(n)}}) for n in range(8)]
        return [final["messages"][-1] for final in await asyncio.gather(*runs)]

    replies = asyncio.run(fleet())
    (pool,) = client.pools().pools
    assert all(reply.response_metadata["cached_prefix_tokens"] == pool.prefix_len for reply in replies)
    computed = [reply.usage_metadata["input_tokens"] - cached(reply) for reply in replies]
    assert max(computed) < 30
    assert client.sessions().sessions == []


def test_compaction_makes_the_context_shorter(client: PoolClient, model: OpencotiChatModel) -> None:
    """Under a trigger that always fires the history stays short, on a branch of the base; the branches before are gone."""
    pools = PoolMiddleware(client)
    compaction = CompactionMiddleware(model, pools, trigger=Trigger(pressure=0.0, min_messages=6), keep=("messages", 2))
    agent = create_agent(
        model, [dive], system_prompt=SYSTEM, middleware=[compaction, BackpressureMiddleware(), pools], checkpointer=InMemorySaver()
    )
    for turn in range(7):
        final = agent.invoke({"messages": [HumanMessage(f"turn {turn}")]}, {"configurable": {"thread_id": "c"}})
    tree = client.pools().pools
    assert [pool.parent for pool in tree] == [None, tree[0].pool_id]
    assert len(final["messages"]) < 12
    assert final["messages"][-1].response_metadata["cached_prefix_tokens"] == tree[1].prefix_len


def test_what_does_not_fit_is_an_overflow(model: OpencotiChatModel) -> None:
    """The engine's own refusal, as the error from which summarising middleware recovers."""
    with pytest.raises(ContextExceededError) as over:
        model.invoke("keel " * (N_CTX + 100))
    assert over.value.n_ctx is not None
