"""A toy tokenizer and chat template: one token per word with its leading space, so that text boundaries can merge.

Law: deterministic in one process and over engine boots; a word gets its id when first seen. Exactly one begin token per prompt.
"""

from __future__ import annotations

import re

BOS = 1
FIRST_WORD = 16
N_VOCAB = 32_000
_WORDS = re.compile(r"<\|\w+\|>| ?\w+|\s|[^\w\s]")


class ToyTokenizer:
    """Words to ids and back."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: dict[int, str] = {BOS: ""}

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of a text; a begin token in front unless the text has one."""
        ids = [self._id(word) for word in _WORDS.findall(text)]
        return [BOS, *ids] if bos else ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        return "".join(self._words.get(token, f"<{token}>") for token in ids)

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = FIRST_WORD + len(self._ids)
            self._words[self._ids[word]] = word
        return self._ids[word]


class TemplateError(Exception):
    """The template refuses the messages."""


def render(messages: list[dict], tools: list | None, kwargs: dict) -> str:
    """The chat template: tools first, then turns, then the generation prompt; a last assistant turn is continued."""
    if kwargs.get("date_first"):
        return f"{messages[-1]['content'].split()[0]} then " + render(messages, tools, {})
    if not isinstance(messages, list):
        raise TemplateError("Expected 'messages' to be an array")
    parts = [f"<|tools|>{tools}<|end|>"] if tools else []
    for number, message in enumerate(messages):
        if message.get("role") not in {"system", "user", "assistant", "tool"}:
            raise TemplateError(f"unknown role {message.get('role')!r}")
        last = number == len(messages) - 1
        end = "" if last and message["role"] == "assistant" else "<|end|>"
        parts.append(f"<|{message['role']}|>{message.get('content')}{end}")
    if messages[-1]["role"] != "assistant":
        parts.append("<|assistant|>")
    return "".join(parts)
