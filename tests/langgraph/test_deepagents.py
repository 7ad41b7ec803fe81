"""deepagents: forked and isolated sub-agents on the real proxy, and the table of state keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, NotRequired

import pytest
from deepagents import create_deep_agent
from langchain.agents.middleware.types import AgentMiddleware, AgentState, OmitFromSchema, PrivateStateAttr
from langchain_core.messages import HumanMessage
from langgraph.errors import InvalidUpdateError

from opencoti_langgraph import PoolMiddleware
from tests.fakes.scripted_chat import Answer
from tests.langgraph.fleet import Fleet, fleet, run

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
SYSTEM = "You are a terse sailor who knows ships and harbours."


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(tmp_path, n_ctx=16384) as world:
        world.say = delegating
        yield world


def delegating(body: dict[str, Any]) -> Answer:
    """The main agent gives out two tasks at once; whoever has a task does it."""
    last = body["messages"][-1]
    if last["role"] == "user" and "delegate" in str(last["content"]) and "task" not in str(last["content"]):
        return Answer(calls=[("task", {"description": f"task {n}", "subagent_type": "helper"}) for n in (1, 2)])
    return Answer("done.")


def deep(world: Fleet, mode: str, *middleware: AgentMiddleware[Any, Any, Any]) -> Any:
    """A deep agent with one kind of helper; forks inherit the agent's middleware."""
    helper: dict[str, Any] = {"name": "helper", "description": "helps", "mode": mode}
    if mode == "isolated":
        helper |= {"system_prompt": "Help with everything.", "middleware": list(middleware)}
    return create_deep_agent(world.model, system_prompt=SYSTEM, middleware=list(middleware), subagents=[helper])


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_forked_children_share_a_fork_of_their_parent_s_pool(world: Fleet, way: str) -> None:
    """Two at once: one child pool with the history, below the parent's base, a session for each; all of it is gone in the end but
    the base and the parent's session.
    """
    used: dict[str, str | None] = {}

    class Looks(AgentMiddleware[Any, Any, Any]):
        """Notes the tree while a child is at work."""

        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            reply = await handler(request)
            used.update(await world.tree())
            return reply

        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            reply = handler(request)
            pools = {pool.pool_id: pool for pool in world.client.pools().pools}
            used.update({pool.name: pools[pool.parent].name if pool.parent else None for pool in pools.values()})
            return reply

    await run(deep(world, "fork", Looks(), PoolMiddleware(world.client)), "delegate", way=way)
    parent, *children, _ = world.asked
    assert len({body["session_id"] for body in (parent, *children)}) == 3
    assert len({body["pool_id"] for body in children}) == 1
    assert children[0]["pool_id"] != parent["pool_id"]
    (base,) = [name for name, above in used.items() if above is None]
    assert [above for above in used.values() if above is not None] == [base]
    assert await world.sessions() == [parent["session_id"]]
    await world.later(301)
    assert list(await world.tree()) == [base]


async def test_isolated_children_share_a_base_of_their_own(world: Fleet) -> None:
    """Their prompt is another: one base for both, beside the parent's, and every request is served from its pool."""
    await run(deep(world, "isolated", PoolMiddleware(world.client)), "delegate")
    parent, *children, again = world.asked
    assert len({body["pool_id"] for body in children}) == 1
    assert parent["pool_id"] == again["pool_id"] != children[0]["pool_id"]
    assert set((await world.tree()).values()) == {None}
    assert all(pool["n_hits"] == pool["n_queries"] > 0 for pool in await world.listed())


class Plain(AgentState[Any]):
    pool_id: NotRequired[int]


class KeepFirst(AgentState[Any]):
    pool_id: NotRequired[Annotated[int, lambda old, new: old or new]]


class Private(AgentState[Any]):
    pool_id: NotRequired[Annotated[int, PrivateStateAttr]]


class Hidden(AgentState[Any]):
    pool_id: NotRequired[Annotated[int, OmitFromSchema(input=False, output=True)]]


TABLE = [
    (Plain, True, InvalidUpdateError),
    (KeepFirst, True, [1, 1]),
    (Private, False, [11, 12]),
    (Hidden, True, [11, 12]),
]


@pytest.mark.parametrize(("schema", "inherits", "outcome"), TABLE)
@pytest.mark.parametrize("mode", ["isolated", "fork"])
async def test_only_a_hidden_output_serves_children_that_run_at_once(
    world: Fleet, schema: type, inherits: bool, outcome: Any, mode: str
) -> None:
    """The four ways to keep `pool_id` in state: what a child sees of its parent's, and on which one it then runs."""
    saw: list[bool] = []
    ran: list[int] = []

    class Marks(AgentMiddleware[Any, Any, Any]):
        state_schema = schema

        def before_agent(self, state: Any, runtime: Any) -> Any:
            if not child(state):
                return {"pool_id": 1}
            saw.append(state.get("pool_id") is not None)
            return {"pool_id": 10 + int(state["messages"][-1].content[-1])}

        def after_agent(self, state: Any, runtime: Any) -> None:
            if child(state):
                ran.append(state["pool_id"])

    def child(state: Any) -> bool:
        asked = [message for message in state["messages"] if isinstance(message, HumanMessage)]
        return "task" in str(asked[-1].content)

    agent = deep(world, mode, Marks())
    if isinstance(outcome, type):
        with pytest.raises(outcome):
            await run(agent, "delegate", way="sync")
    else:
        await run(agent, "delegate", way="sync")
        assert sorted(ran) == outcome
    assert saw == [inherits, inherits]
