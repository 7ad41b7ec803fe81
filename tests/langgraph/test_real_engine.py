"""The package on the real engine through the real proxy, with a tiny model: counts that a fake could only claim."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver

from opencoti_langgraph import (
    BackpressureMiddleware,
    CompactionMiddleware,
    ContextExceededError,
    OpencotiChatModel,
    PoolClient,
    PoolMiddleware,
    Trigger,
)
from tests.langgraph.agents import SYSTEM, cached, clients, give_back, model_of
from tests.langgraph.real import N_CTX
from tests.langgraph.sailing import dive

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, engine_path: Path) -> Iterator[PoolClient]:
    with clients(engine_path, tmp_path_factory.mktemp("langgraph")) as client:
        yield client


@pytest.fixture
def model(client: PoolClient) -> Iterator[OpencotiChatModel]:
    yield model_of(client)
    give_back(client)


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
