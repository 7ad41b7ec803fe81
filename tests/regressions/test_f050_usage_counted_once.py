"""F050: usage in a stream is there once and equals that of the whole reply; our counts are the same, asked for or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict

import httpx
import pytest
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from prometheus_client.parser import text_string_to_metric_families

from opencoti_langgraph import PoolClient
from tests.langgraph.agents import SYSTEM, cached, clients, model_of
from tests.langgraph.conftest import no_traces  # noqa: F401 - pytest finds the fixture here

pytestmark = pytest.mark.engine

ASK: list[BaseMessage] = [SystemMessage(SYSTEM), HumanMessage("Where is the keel?")]
COUNTS = ("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total", "vllm:generation_tokens_total")


def counted(client: PoolClient) -> list[float]:
    """What the proxy has counted; its page may be a moment old."""
    page = httpx.get(f"{client.base_url}/metrics", trust_env=False).text
    found = {one.name: one.value for family in text_string_to_metric_families(page) for one in family.samples}
    return [found[name] for name in COUNTS]


def until_counted(client: PoolClient, *expected: float) -> None:
    """Until all of it is counted, and not more."""
    while (now := counted(client)) != list(expected):
        assert all(value <= limit for value, limit in zip(now, expected, strict=True)), f"{now} is more than {expected}"


class State(TypedDict):
    messages: Annotated[list[BaseMessage], add_messages]


def in_a_graph(bound: Any) -> tuple[list[AIMessageChunk], BaseMessage]:
    """One node, two stream modes: the pieces, and the message of the last state."""
    builder: Any = StateGraph(State)
    builder.add_node("ask", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph = builder.add_edge(START, "ask").compile()
    pieces: list[AIMessageChunk] = []
    final: dict[str, Any] = {}
    for mode, item in graph.stream({"messages": ASK}, stream_mode=["messages", "values"]):
        if mode == "messages":
            pieces.append(item[0])
        else:
            final = item
    return pieces, final["messages"][-1]


def test_streamed_usage_is_that_of_the_whole_reply(engine_path: Path, tmp_path: Path) -> None:
    """Whole, streamed in a graph, and streamed without asking for usage: the same counts each time, by the client's and by ours."""
    with clients(engine_path, tmp_path) as client:
        model = model_of(client)
        pool = client.create_pool(messages=[{"role": "system", "content": SYSTEM}])
        whole: Any = model.invoke(ASK, pool_id=pool.pool_id, session_id="whole")
        usage = whole.usage_metadata
        assert (cached(whole), usage["output_tokens"]) == (pool.prefix_len, 6)
        grown = [usage["input_tokens"], pool.prefix_len, 6]
        until_counted(client, *grown)
        assert model.get_num_tokens_from_messages(ASK) == usage["input_tokens"]

        pieces, last = in_a_graph(model.bind(pool_id=pool.pool_id, session_id="graph"))
        assert [piece.usage_metadata for piece in pieces if piece.usage_metadata] == [usage]
        assert (last.text, getattr(last, "usage_metadata", None)) == (whole.text, usage)
        assert last.response_metadata["timings"]["predicted_n"] == 6
        assert (last.response_metadata["pool_id"], last.response_metadata["session_id"]) == (pool.pool_id, "graph")
        until_counted(client, *(2 * one for one in grown))

        silent = model.model_copy(update={"stream_usage": False})
        unasked = list(silent.bind(pool_id=pool.pool_id, session_id="unasked").stream(ASK))
        assert "".join(piece.text for piece in unasked) == whole.text
        until_counted(client, *(3 * one for one in grown))
        assert [client.session(name).n_turns for name in ("whole", "graph", "unasked")] == [1, 1, 1]
        assert {client.session(name).ctx_used for name in ("whole", "graph", "unasked")} <= {
            usage["total_tokens"],
            usage["total_tokens"] - 1,
        }
