"""deepagents on the real engine: a model that delegates, and a child that goes on from a fork of its parent's pool."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepagents import create_deep_agent
from langchain.agents.middleware.types import AgentMiddleware
from langchain_core.messages import HumanMessage

from opencoti_langgraph import BackpressureMiddleware, OpencotiChatModel, PoolClient, PoolMiddleware
from tests.langgraph.real import served_puppet

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")]


def test_a_forked_child_computes_its_task_alone(tmp_path: Path, engine_path: Path) -> None:
    """The parent's prompt of some thousand tokens is computed once: the child's request is served from a fork that holds the
    history, and computes little more than its own task. Its session is gone in the end, and the fork with it.
    """
    seen: list[tuple[int | None, int, int]] = []

    class Looks(AgentMiddleware):
        """Notes where each request went, what it had of it, and how long it was."""

        def wrap_model_call(self, request, handler):  # type: ignore[no-untyped-def]
            reply = handler(request)
            facts = reply.model_response.result[-1] if hasattr(reply, "model_response") else reply.result[-1]
            told = facts.response_metadata
            seen.append((told["pool_id"], told["cached_prefix_tokens"], facts.usage_metadata["input_tokens"]))
            return reply

    with served_puppet(engine_path, tmp_path) as served, PoolClient(served.url) as client:
        model = OpencotiChatModel(base_url=f"{served.url}/v1", model="puppet", max_tokens=64, n_ctx=16384)
        agent = create_deep_agent(
            model,
            system_prompt="You look after a harbour.",
            middleware=[Looks(), BackpressureMiddleware(), PoolMiddleware(client)],
            subagents=[{"name": "helper", "description": "helps", "mode": "fork"}],
        )
        final = agent.invoke({"messages": [HumanMessage("Who looks at the lamps?")]})
        assert [message.type for message in final["messages"]] == ["human", "ai", "tool", "ai"]
        (base, *_), child, *_, last = seen
        assert last[0] == base
        assert child[0] != base
        assert child[1] > seen[0][1] > 1000
        assert child[2] - child[1] < 200
        assert [pool.pool_id for pool in client.pools().pools] == [base]
        assert len(client.sessions().sessions) == 1
