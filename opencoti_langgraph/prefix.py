"""What a prompt begins with, as fingerprints, and where two prompts part.

Law: pure. Fingerprints go into state and logs, never the text. The order is that of most templates' weight: system, tools, turns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage

SYSTEM, TOOLS = 0, 1
N_HEAD = 2
"""Fingerprints that stand before those of turns: system prompt, tools."""


def print_of(value: Any) -> str:
    """A short fingerprint of JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt: the part that agents of one kind have in common, and the turns."""

    system: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    kwargs: Mapping[str, Any]
    turns: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Prompt:
        """Of `OpencotiChatModel.prompt_body`. System messages at the beginning are the system prompt."""
        messages = body["messages"]
        n = next((at for at, message in enumerate(messages) if message["role"] not in {"system", "developer"}), len(messages))
        kwargs = body.get("chat_template_kwargs") or {}
        return cls(tuple(messages[:n]), tuple(body.get("tools") or ()), kwargs, tuple(messages[n:]))

    @property
    def prints(self) -> list[str]:
        """One for the system prompt, one for tools and template settings, one for each turn."""
        return [print_of(self.system), print_of([self.tools, self.kwargs]), *map(print_of, self.turns)]

    @property
    def head(self) -> str:
        """One fingerprint of system prompt and tools: the key of a base pool."""
        return print_of(self.prints[:N_HEAD])

    def body(self, n_turns: int = 0) -> dict[str, Any]:
        """What makes a pool of the head and the first turns."""
        parts = {
            "messages": [*self.system, *self.turns[:n_turns]],
            "tools": list(self.tools),
            "chat_template_kwargs": dict(self.kwargs),
        }
        return {key: value for key, value in parts.items() if value}


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt leaves what its pool holds. `part`: `system`, `tools` or `turn`; `index` and `role` of the turn."""

    part: str
    index: int | None = None
    role: str | None = None
    position: int | None = None

    def __str__(self) -> str:
        where = (
            f"turn {self.index} ({self.role})" if self.part == "turn" else {"system": "the system prompt"}.get(self.part, self.part)
        )
        return where if self.position is None else f"{where}, at token {self.position}"


def divergence(held: Sequence[str], prompt: Prompt) -> Divergence | None:
    """Where the prompt leaves the fingerprints of a pool; None when it begins with all of them."""
    now = prompt.prints
    at = next((n for n, (ours, theirs) in enumerate(zip(held, now, strict=False)) if ours != theirs), min(len(held), len(now)))
    if at == len(held):
        return None
    if at < N_HEAD:
        return Divergence("system" if at == SYSTEM else "tools")
    turn = at - N_HEAD
    role = prompt.turns[turn]["role"] if turn < len(prompt.turns) else None
    return Divergence("turn", turn, role)


def late_context(messages: Sequence[BaseMessage], text: str) -> list[BaseMessage]:
    """The messages with a text that changes (a clock, what was retrieved) at the end of the last user turn.

    So what stands before keeps its KV. Use it for the request only; what is kept in state must not have it.
    """
    found = list(messages)
    for at in range(len(found) - 1, -1, -1):
        if isinstance(message := found[at], HumanMessage):
            content = [*message.content] if isinstance(message.content, list) else [{"type": "text", "text": message.content}]
            found[at] = message.model_copy(update={"content": [*content, {"type": "text", "text": f"\n\n{text}"}]})
            return found
    return [*found, HumanMessage(text)]
