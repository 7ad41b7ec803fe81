"""Chat completions as an OpenAI-compatible engine words them, from a script instead of a model.

Law: an answer is a function of the request: tool arguments and JSON are built from the request's own schemas, so all that depends
on a client's handling is tested without understanding. The last event of a stream carries usage, timings and our `opencoti` object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TIMINGS = {"prompt_n": 3, "prompt_ms": 1.5, "predicted_n": 4, "predicted_ms": 80.25, "predicted_per_second": 49.8}


@dataclass
class Answer:
    """What the model says."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    finish: str | None = None

    @property
    def finish_reason(self) -> str:
        return self.finish or ("tool_calls" if self.calls else "stop")


Brain = Callable[[Mapping[str, Any]], Answer]


def value_for(schema: Mapping[str, Any], text: str, root: Mapping[str, Any]) -> Any:
    """A value that fits a JSON schema; numbers and quoted words are taken from the text."""
    if "$ref" in schema:
        return value_for(root["$defs"][schema["$ref"].split("/")[-1]], text, root)
    if "enum" in schema:
        return schema["enum"][0]
    for variants in ("anyOf", "oneOf", "allOf"):
        if variants in schema:
            return value_for(schema[variants][0], text, root)
    match schema.get("type"):
        case "object":
            return {name: value_for(part, text, root) for name, part in schema.get("properties", {}).items()}
        case "array":
            return [value_for(schema.get("items", {}), text, root)]
        case "integer" | "number":
            return int((re.findall(r"\((\d+)\)", text) or re.findall(r"\d+", text) or ["1"])[-1])
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return (re.findall(r"'([^']+)'", text) or ["a word"])[0]


def last_text(body: Mapping[str, Any], role: str = "user") -> str:
    """The text of the last message of a role."""
    for message in reversed(body["messages"]):
        if message["role"] == role:
            content = message.get("content")
            return content if isinstance(content, str) else json.dumps(content)
    return ""


def capable(body: Mapping[str, Any]) -> Answer:
    """What a capable model would say to the standard tests."""
    text, tools = last_text(body), body.get("tools") or []
    called = body["messages"][-1]["role"] == "tool"
    if tools and not called and (body.get("tool_choice") == "required" or body.get("tool_choice", "auto") == "auto"):
        function = tools[0]["function"]
        return Answer(calls=[(function["name"], value_for(function.get("parameters", {}), text, function.get("parameters", {})))])
    wanted = body.get("response_format", {})
    if wanted.get("type") == "json_schema":
        schema = wanted["json_schema"]["schema"]
        return Answer(json.dumps(value_for(schema, text, schema), ensure_ascii=False))
    if wanted.get("type") == "json_object":
        return Answer(json.dumps(dict.fromkeys(re.findall(r"'(\w+)'", text), "a cat")))
    return Answer("The keel lies below.", reasoning="think of ships. " if body.get("chat_template_kwargs", {}).get("think") else "")


def usage_of(body: Mapping[str, Any], answer: Answer, n_cached: int) -> dict[str, Any]:
    """Counts that depend on the request alone."""
    n_prompt = sum(len(str(message.get("content")).split()) + 4 for message in body["messages"])
    n_answer = max(1, len(answer.content.split()) + 5 * len(answer.calls))
    cached = {"cached_tokens": min(n_cached, n_prompt - 1)}
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "prompt_tokens_details": cached,
    }


def whole(body: Mapping[str, Any], answer: Answer, usage: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """The reply in one piece."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(args, ensure_ascii=False)}}
            for n, (name, args) in enumerate(answer.calls)
        ]
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason}
    return {**_head(body, "chat.completion"), "choices": [choice], "usage": dict(usage), **extras}


def events(
    body: Mapping[str, Any], answer: Answer, usage: Mapping[str, Any], extras: Mapping[str, Any], *, timings_always: bool = False
) -> Iterator[dict[str, Any]]:
    """The events of a stream, the last with usage and extras. `timings_always`: others with each, as with `timings_per_token`."""
    head = _head(body, "chat.completion.chunk")
    deltas = [{"role": "assistant", "content": None}, *_deltas(answer)]
    for n, delta in enumerate(deltas):
        timings = {"timings": {**TIMINGS, "predicted_n": n, "predicted_ms": n * 1.25}} if timings_always else {}
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **timings}
    finish = {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield finish
        yield {**head, "choices": [], "usage": dict(usage), **extras}
    else:
        yield {**finish, **extras}


@dataclass
class Said:
    """What a fake engine with a brain answers: the brain's words, the engine's counts."""

    body: Mapping[str, Any]
    answer: Answer

    def _usage(self, facts: Any) -> dict[str, Any]:
        n_answer = max(1, len(self.answer.content.split()))
        cached = {"cached_tokens": facts.n_cached}
        counts = {"prompt_tokens": facts.n_prompt, "completion_tokens": n_answer, "total_tokens": facts.n_prompt + n_answer}
        return {**counts, "prompt_tokens_details": cached}

    def whole(self, facts: Any, reply: Mapping[str, Any]) -> dict[str, Any]:
        """The reply in one piece, with what the engine says beside."""
        return whole(self.body, self.answer, self._usage(facts), _beside(reply))

    def events(self, facts: Any, reply: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The same in events."""
        return events(self.body, self.answer, self._usage(facts), _beside(reply))


def _beside(reply: Mapping[str, Any]) -> dict[str, Any]:
    return {key: reply[key] for key in ("timings", "opencoti") if key in reply}


def _deltas(answer: Answer) -> Iterator[dict[str, Any]]:
    for word in answer.reasoning.split(" ") if answer.reasoning else []:
        yield {"reasoning_content": word + " "}
    for word in re.findall(r"\s*\S+", answer.content):
        yield {"content": word}
    for index, (name, args) in enumerate(answer.calls):
        call = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        yield {"tool_calls": [call]}
        text = json.dumps(args, ensure_ascii=False)
        for at in range(0, len(text), 7):
            yield {"tool_calls": [{"index": index, "function": {"arguments": text[at : at + 7]}}]}


def _head(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": kind,
        "created": 1_700_000_000,
        "model": body.get("model", "toy"),
        "system_fingerprint": "b1",
    }
