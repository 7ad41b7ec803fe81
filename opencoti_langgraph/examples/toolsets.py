"""Journey B, divergent tools: two groups share a preamble and part at their tools; each group shares one pool."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool, tool

from opencoti_langgraph.examples.show import SYSTEM, show
from opencoti_langgraph.pool_middleware import PoolMiddleware


@tool
def tide(hour: int) -> str:
    """Tell the height of the tide at an hour."""
    return f"{hour % 6} metres"


@tool
def crane(pier: str, load: int) -> str:
    """Order the crane of a pier for a load in tonnes."""
    return f"{pier}: {load} t booked"


@tool
def radio(boat: str) -> str:
    """Call a boat."""
    return f"{boat} answers"


GROUPS: dict[str, list[BaseTool]] = {"pilots": [tide, radio], "dockers": [crane, tide]}


def main() -> None:
    """Run it: three agents of each group."""
    with show(str(__doc__)) as running:
        used = {}
        for group, tools in GROUPS.items():
            for n in range(3):
                middleware = [PoolMiddleware(running.client)]
                agent = create_agent(
                    running.model, tools[:: 1 if n % 2 else -1], system_prompt=SYSTEM, middleware=middleware, name=group
                )
                ask: Any = {"messages": [HumanMessage(f"What does number {n} do next?")]}
                reply = running.saw(agent.invoke(ask, {"configurable": {"thread_id": f"{group}-{n}"}})["messages"][-1])
                told = reply.response_metadata
                print(f"{group} {n}: pool {told['pool_id']}, {told['cached_prefix_tokens']} tokens shared")
            used[group] = running.client.pool(told["pool_id"])
        first, second = used.values()
        parts = running.client.diff(first.pool_id, second.pool_id)
        print(f"the groups' prompts part after {parts.common_len} of {first.prefix_len} and {second.prefix_len} tokens")


if __name__ == "__main__":
    main()
