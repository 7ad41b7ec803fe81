"""Fan-out with a gate: eight tasks, as many at once as there is room for, all on one shared pool."""

from __future__ import annotations

import operator
from typing import Annotated, Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.graph import START, StateGraph

from opencoti_langgraph.examples.show import SYSTEM, show
from opencoti_langgraph.gate import add_capacity_gate
from opencoti_langgraph.state import PoolState


class State(PoolState, total=False):
    """Tasks, and answers by task."""

    tasks: list[str]
    answers: Annotated[dict[str, AIMessage], operator.or_]


def main() -> None:
    """Run it."""
    with show(str(__doc__)) as running:
        pool = running.client.create_pool(messages=[{"role": "system", "content": SYSTEM}], name="harbour", ttl_s=600)

        def work(sent: dict[str, Any]) -> dict[str, Any]:
            ask = [SystemMessage(SYSTEM), HumanMessage(sent["task"])]
            bound = running.model.bind(pool_id=sent["pool_id"], session_id=f"worker {sent['task']}")
            return {"answers": {sent["task"]: bound.invoke(ask)}}

        builder: Any = StateGraph(State)
        builder.add_node("worker", work)
        left = lambda state: [task for task in state["tasks"] if task not in state.get("answers", {})]  # noqa: E731 # read as one line
        add_capacity_gate(builder, running.client, todo=left, expected_tokens=64)
        graph = builder.add_edge(START, "gate").compile()
        tasks = [f"What is at berth {n}?" for n in range(1, 9)]
        final: dict[str, Any] = {}
        for final in graph.stream({"tasks": tasks, "pool_id": pool.pool_id}, stream_mode="values"):
            print(f"{len(final.get('answers', {}))} of {len(tasks)} done, headroom {final.get('headroom_sessions', '?')}")
        for reply in final["answers"].values():
            running.saw(reply)


if __name__ == "__main__":
    main()
