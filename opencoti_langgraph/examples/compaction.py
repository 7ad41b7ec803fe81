"""Compaction under pressure: a long conversation is summarised again and again, and its pool swapped for a shorter branch."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver

from opencoti_langgraph.backpressure import BackpressureMiddleware
from opencoti_langgraph.compaction import Trigger
from opencoti_langgraph.compaction_middleware import CompactionMiddleware
from opencoti_langgraph.examples.show import SYSTEM, show
from opencoti_langgraph.pool_middleware import PoolMiddleware

TURNS = 10


def main() -> None:
    """Run it. The trigger fires without any pressure, so that it can be seen with any size of context."""
    with show(str(__doc__)) as running:
        pools = PoolMiddleware(running.client)
        trigger = Trigger(pressure=0.0, min_messages=6)
        compaction = CompactionMiddleware(running.model, pools, trigger=trigger, keep=("messages", 2))
        agent = create_agent(
            running.model,
            [],
            system_prompt=SYSTEM,
            middleware=[compaction, BackpressureMiddleware(), pools],
            checkpointer=InMemorySaver(),
        )
        for turn in range(TURNS):
            ask: Any = {"messages": [HumanMessage(f"Turn {turn}: what is to be done at pier {turn % 3 + 1}?")]}
            final = agent.invoke(ask, {"configurable": {"thread_id": "long"}})
            reply = running.saw(final["messages"][-1])
            used = (reply.usage_metadata or {"input_tokens": 0})["input_tokens"]
            print(
                f"turn {turn}: {len(final['messages'])} messages, {used} prompt tokens, pool {reply.response_metadata['pool_id']}"
            )
        print(f"pressure now: {running.client.capacity().compaction_pressure}")


if __name__ == "__main__":
    main()
