"""LangChain's standard content blocks of our messages.

Law: core's best effort does the work; only the index of streamed tool calls is changed. In Chat Completions it starts at 0 and
collides with the index that core gives to the text or reasoning block, and the call would vanish from `content_blocks`.
"""

from __future__ import annotations

from typing import Any, cast

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.block_translators import register_translator
from langchain_core.messages.content import ContentBlock

PROVIDER = "opencoti"


def _plain(message: BaseMessage) -> BaseMessage:
    """A copy that names no provider, so that core does not come back to us."""
    rest = {key: value for key, value in message.response_metadata.items() if key != "model_provider"}
    return message.model_copy(update={"response_metadata": rest})


def whole_blocks(message: AIMessage) -> list[ContentBlock]:
    """Blocks of a whole message."""
    return _plain(message).content_blocks


def chunk_blocks(message: AIMessageChunk) -> list[ContentBlock]:
    """Blocks of a chunk of a message."""
    return [_apart(block) for block in _plain(message).content_blocks]


def _apart(block: ContentBlock) -> ContentBlock:
    index = block.get("index")
    if block["type"] != "tool_call_chunk" or not isinstance(index, int):
        return block
    return cast("ContentBlock", {**cast("dict[str, Any]", block), "index": f"lc_tc_{index}"})


def register() -> None:
    """Make core use these for our provider."""
    register_translator(PROVIDER, whole_blocks, chunk_blocks)
