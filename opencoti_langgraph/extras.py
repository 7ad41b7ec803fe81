"""What a reply says beside the answer: our `opencoti` object, the engine's timings, reasoning.

Law: pure. Of a stream the last value of each counts and is told once, on its last chunk: LangChain adds the metadata of chunks up,
and would join equal words and refuse differing numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk
from pydantic import Field

REASONING_FIELDS = ("reasoning_content", "reasoning")
"""How servers name it: llama.cpp, and others."""


class CarryingChunk(ChatGenerationChunk):
    """A chunk with what its event said beside the text. `finished`: the engine said why it stopped."""

    extras: dict[str, Any] = Field(default_factory=dict, exclude=True, repr=False)
    finished: bool = Field(default=False, exclude=True, repr=False)


def extras_of(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Our part of a reply or of one event of a stream."""
    return {key: value for key in ("opencoti", "timings") if isinstance(value := reply.get(key), Mapping)}


def metadata_of(extras: Mapping[str, Any]) -> dict[str, Any]:
    """`response_metadata` of a reply; empty for a server that says nothing of this."""
    found: dict[str, Any] = {}
    if (timings := extras.get("timings")) is not None:
        found["timings"] = dict(timings)
    if (ours := extras.get("opencoti")) is not None:
        found |= {
            "pool_id": ours.get("pool_id"),
            "session_id": ours.get("session_id"),
            "session_tps": ours.get("session_tps"),
            "backpressure": ours.get("backpressure"),
            "headroom": {"sessions": ours.get("headroom_sessions"), "ctx_tokens": ours.get("ctx_headroom_tokens")},
            "cached_prefix_tokens": ours.get("cached_prefix_tokens"),
            "opencoti": dict(ours),
        }
    return found


def reasoning_in(part: Mapping[str, Any]) -> str:
    """The reasoning of a message or delta, under whichever name."""
    return next((text for field in REASONING_FIELDS if isinstance(text := part.get(field), str) and text), "")


def reasoning_of(message: BaseMessage) -> str:
    """The reasoning that an earlier turn came with."""
    if not isinstance(message, AIMessage):
        return ""
    return "".join(str(block.get("reasoning", "")) for block in message.content_blocks if block["type"] == "reasoning")


def flat(content: Any) -> Any:
    """Text blocks as one text, as the engine generated it; anything else as it is."""
    if not isinstance(content, list) or not all(isinstance(block, Mapping) and block.get("type") == "text" for block in content):
        return content
    return "".join(block["text"] for block in content)


def tool_name(tool: Mapping[str, Any]) -> str:
    """The name by which tools are put into a fixed order."""
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, Mapping) else str(tool.get("name", ""))
