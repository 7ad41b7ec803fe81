"""Journey A, nested: a lead works on a task, its sub-agents go on from a fork of its context, and so do theirs."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage

from opencoti_langgraph.backpressure import BackpressureMiddleware
from opencoti_langgraph.examples.show import SYSTEM, Show, show
from opencoti_langgraph.pool_middleware import PoolMiddleware

TASK = "A storm comes up from the west at dusk, with four sailing boats still outside and the ferry half way across."


def delegate(running: Show, pool: int, context: list[dict[str, str]], depth: int) -> None:
    """Two sub-agents on a fork that holds the context; each may delegate again."""
    agent = create_agent(
        running.model, [], system_prompt=SYSTEM, middleware=[BackpressureMiddleware(), PoolMiddleware(running.client)]
    )
    for part in ("boats", "people"):
        ask = [*(HumanMessage(turn["content"]) for turn in context[1:]), HumanMessage(f"Say what to do about the {part}.")]
        state: Any = {"messages": ask, "pool_id": pool}
        final = agent.invoke(state, {"configurable": {"thread_id": f"{pool}-{part}"}})
        reply = running.saw(final["messages"][-1])
        print(f"{'  ' * (3 - depth)}{part} on pool {pool}: {reply.response_metadata['cached_prefix_tokens']} tokens shared")
        if depth > 1:
            deeper = [*context, {"role": "user", "content": f"Only the {part} now."}]
            fork = running.client.fork_pool(pool, messages=deeper, ttl_s=600)
            delegate(running, fork.pool_id, deeper, depth - 1)


def main() -> None:
    """Run it, three levels deep."""
    with show(str(__doc__)) as running:
        head = [{"role": "system", "content": SYSTEM}]
        base = running.client.create_pool(messages=head, ttl_s=600)
        context = [*head, {"role": "user", "content": TASK}]
        task = running.client.fork_pool(base.pool_id, messages=context, ttl_s=600)
        print(f"the task's pool shares {task.branch_pos} of its {task.prefix_len} tokens with the base")
        delegate(running, task.pool_id, context, 3)


if __name__ == "__main__":
    main()
