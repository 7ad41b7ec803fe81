"""From what a caller gave to token ids, by the engine's own rendering and tokenising.

Law: the proxy never renders a template and never tokenises. What the real route would prefill is what counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polykv_proxy.core.prefix import Tokens, common_prefix_of
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.engine.wire import Hello
from polykv_proxy.errors import ApiError, EngineRefusedError

COMPLETION = "/completion"
CHAT = "/v1/chat/completions"
_USER_AFTER = frozenset({"system", "developer", "assistant"})
_DUMMIES = ("A new turn.", "7 is a number.")
"""Two texts that differ from their first character, so that the common tokens end before the next turn's own text."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The start of a conversation as the chat route takes it; `extra` holds tools and template arguments."""

    messages: Sequence[Mapping[str, object]]
    extra: Mapping[str, object] = field(default_factory=dict)


async def prefix_of_prompt(client: EngineClient, prompt: str) -> Tokens:
    """Token ids of a text, as the completion route would prefill it."""
    return await _single(client, COMPLETION, {"prompt": prompt}, "prompt")


async def prefix_of_messages(client: EngineClient, conversation: Conversation) -> Tokens:
    """Token ids that every continuation of a conversation starts with.

    The conversation is rendered with two different next turns; what both have in common is kept. ApiError 422 when that is nothing.
    """
    role = "user" if conversation.messages[-1].get("role") in _USER_AFTER else "assistant"
    rendered = []
    for dummy in _DUMMIES:
        messages = [*conversation.messages, {"role": role, "content": dummy}]
        rendered.append(await _single(client, CHAT, {**conversation.extra, "messages": messages}, "messages"))
    length = common_prefix_of(rendered)
    if not length:
        raise ApiError(
            "template_not_splittable",
            "the model's chat template renders these messages differently for each next turn, from the first token on; "
            "create the pool from `prompt` or `tokens`",
            param="messages",
        )
    return rendered[0][:length]


async def _single(client: EngineClient, target: str, body: Mapping[str, object], param: str) -> Tokens:
    try:
        found = await client.dry_run(client.api_prefix + target, json.dumps(body).encode())
    except EngineRefusedError as error:
        if error.status < 500:
            raise ApiError("invalid_request", f"the engine refuses {param}: {error.message}", param=param) from error
        if param == "messages":
            raise ApiError(
                "template_not_splittable", f"the model's chat template refuses these messages: {error.message}", param=param
            ) from error
        raise
    if len(found) != 1:
        raise ApiError("invalid_request", f"{param} must be one prompt; the engine sees {len(found)}", param=param)
    return found[0]


def check_tokens(tokens: Tokens, hello: Hello, param: str) -> None:
    """Can these ids be a pool of this engine? ApiError names the first bad id, or the limit."""
    if not tokens.size:
        raise ApiError("invalid_request", f"{param} gives an empty prefix; a pool needs at least one token", param=param)
    bad = (tokens < 0) | (tokens >= hello.model.n_vocab)
    if bad.any():
        at = int(bad.argmax())
        if int(tokens[at]) == -1 and param != "tokens":
            raise ApiError("invalid_request", f"{param} contains media; a pool holds text only", param=param)
        raise ApiError(
            "invalid_request",
            f"{param}[{at}] is {int(tokens[at])}; token ids of this model are 0 to {hello.model.n_vocab - 1}",
            param=f"{param}[{at}]",
        )
    if tokens.size >= hello.n_ctx_slot:
        raise ApiError(
            "cannot_fit",
            f"the prefix has {tokens.size} tokens and a request has {hello.n_ctx_slot} in all; a pool must be shorter",
            param=param,
            extra={"n_tokens": int(tokens.size), "n_ctx": hello.n_ctx_slot},
        )
