"""Token positions as text: what stands around a place, by the engine's own vocabulary.

Law: text is a help for people; where the engine does not give it, nothing is missing but the help.
"""

from __future__ import annotations

import asyncio

from polykv_proxy.core.prefix import Tokens
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.errors import ApiError, EngineError

AROUND = 8
"""Tokens shown before and after a position."""


async def text_around(client: EngineClient, tokens: Tokens, position: int) -> str | None:
    """The text of a few tokens around a position; None when the engine does not say."""
    try:
        return await client.detokenize(tokens[max(0, position - AROUND) : position + AROUND])
    except EngineError:
        return None


async def with_texts(client: EngineClient, error: ApiError, **prefixes: Tokens) -> ApiError:
    """The same error with `NAME_text` for each prefix, around the error's first differing position where it has one."""
    position = error.extra.get("first_differing_position")
    if not isinstance(position, int):
        return error
    found = await asyncio.gather(*(text_around(client, tokens, position) for tokens in prefixes.values()))
    texts = {f"{name}_text": text for name, text in zip(prefixes, found, strict=True) if text is not None}
    return ApiError(error.code, error.message, param=error.param, retry_after_s=error.retry_after_s, extra={**error.extra, **texts})
