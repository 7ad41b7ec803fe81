"""The README's programs run as they stand there, one after the other, against the real proxy."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

import opencoti_langgraph
from opencoti_langgraph import PoolClient
from tests.langgraph.real import served_puppet

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")]
README = Path(opencoti_langgraph.__file__).with_name("README.md").read_text()
ADDRESS = "http://127.0.0.1:8080"


@tool
def get_weather(location: str) -> str:
    """Tell the weather."""
    return f"{location}: calm"


def test_the_readme_s_programs_run(tmp_path: Path, engine_path: Path) -> None:
    """Clients, the chat model, an agent with middleware, deepagents and the gate; what they build works."""
    blocks = [textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", README, re.MULTILINE | re.DOTALL)]
    with served_puppet(engine_path, tmp_path) as served, PoolClient(served.url) as client:
        client.create_pool(messages=[{"role": "system", "content": "You are terse."}], name="agents")
        world: dict[str, Any] = {"tools": [get_weather], "client": client}
        world["work"] = lambda sent: {"done": [sent["task"]]}
        for block in blocks:
            text = re.sub(r"for event in client\.events.*\n.*\n", "", block.replace(ADDRESS, served.url))  # for ever
            exec(compile(text, "README.md", "exec", dont_inherit=True), world)
            world["client"] = client  # theirs is closed again
        assert world["reply"].response_metadata["pool_id"] is not None
        final = world["agent"].invoke({"messages": [HumanMessage("How is the weather?")]}, {"configurable": {"thread_id": "a"}})
        assert [message.type for message in final["messages"]] == ["human", "ai", "tool", "ai"]
        final = world["captain"].invoke({"messages": [HumanMessage("Who goes on?")]}, {"configurable": {"thread_id": "c"}})
        assert final["messages"][-1].text
        graph = world["builder"].compile()
        assert sorted(graph.invoke({"tasks": ["a", "b", "c"]})["done"]) == ["a", "b", "c"]
