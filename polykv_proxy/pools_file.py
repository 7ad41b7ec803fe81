"""The file of declared pools (`--pools`): which pools there are to be before the proxy says that it is ready.

Law: read whole, with all files that it refers to, before anything starts. Every mistake is found and says where it stands; nothing
here asks the engine anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from polykv_proxy.api.wire import Messages, Owner, Seconds, Text, TokenIds, Tools
from polykv_proxy.core.admission.policy import Policy, objections, policy_of
from polykv_proxy.core.pools import NAME_RULE, valid_name
from polykv_proxy.core.prefix import as_tokens
from polykv_proxy.errors import SettingsError
from polykv_proxy.marked_yaml import MarkedYaml, Mistake
from polykv_proxy.runtime.orders import Declared, Lease, PoolSpec
from polykv_proxy.runtime.prefixes import Conversation

_SOURCES = ("tokens", "prompt", "messages")
_FROM_FILES = (*_SOURCES, "tools")
_TOP = ("pools", "admission")
_WAYS = ", ".join([*_SOURCES, *(f"{field}_file" for field in _SOURCES)])


class DeclaredPin(BaseModel):
    """`pin` where it is more than `true` or `false`."""

    model_config = ConfigDict(extra="forbid")

    owner: Owner | None = None
    lease_s: Seconds | Literal["none"] | None = None


class DeclaredPool(BaseModel):
    """One pool of the file; what stands in other files is read already."""

    model_config = ConfigDict(extra="forbid")

    tokens: TokenIds | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parent: StrictStr | None = None
    branch_pos: Annotated[StrictInt, Field(ge=1)] | None = None
    pin: DeclaredPin | Literal[False] | None = None
    ttl_s: Seconds | None = None
    admission: dict[str, Any] | None = None

    def declared(self, name: str) -> Declared:
        """The pool as the runtime takes it."""
        extra = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
        given = {key: value for key, value in extra.items() if value is not None}
        spec = PoolSpec(
            tokens=None if self.tokens is None else as_tokens(self.tokens),
            prompt=self.prompt,
            conversation=None if self.messages is None else Conversation(self.messages, given),
            name=name,
            ttl_s=self.ttl_s,
            branch_pos=self.branch_pos,
        )
        policy = None if self.admission is None else policy_of(self.admission)
        return Declared(name, spec, self.parent, self._lease(), policy)

    def _lease(self) -> Lease | Literal[False] | None:
        if not isinstance(self.pin, DeclaredPin):
            return self.pin
        return Lease(self.pin.owner, None if self.pin.lease_s == "none" else self.pin.lease_s)


_KNOWN = [*DeclaredPool.model_fields, *(f"{field}_file" for field in _FROM_FILES)]


@dataclass(frozen=True, slots=True)
class PoolsFile:
    """The declared pools, each after its parent, else in the order of the file; and the default policy."""

    pools: Sequence[Declared] = ()
    admission: Policy | None = None


def read_pools_file(file: Path) -> PoolsFile:
    """All of it. SettingsError has a line for each mistake."""
    marked = MarkedYaml(_text(file, f"--pools {file}"))
    mistakes = list(marked.mistakes)
    pools, given = ({}, None) if mistakes and marked.value is None else _parts_of(marked, mistakes)
    found = {name: _read_pool(_Place(marked, name, mistakes), file.parent, fields) for name, fields in pools.items()}
    policy = _default_policy(marked, given, mistakes)
    order = _parents_first(marked, pools, mistakes)
    if mistakes:
        lines = sorted({(mistake.line, mistake.text) for mistake in mistakes})
        raise SettingsError("\n".join(f"{file}:{line}: {text}" for line, text in lines))
    return PoolsFile([pool.declared(name) for name in order if (pool := found[name]) is not None], policy)


@dataclass(frozen=True, slots=True)
class _Place:
    """A pool in the file, and where its mistakes go. A field that came from another file stands where that is named."""

    marked: MarkedYaml
    name: str
    mistakes: list[Mistake]

    def wrong(self, text: str, *path: str | int) -> None:
        self.mistakes.append(Mistake(self.marked.line("pools", self.name, *path), f"pool {self.name:.80}: {text}"))


def _parts_of(marked: MarkedYaml, mistakes: list[Mistake]) -> tuple[Mapping[str, Any], Any]:
    """The pools by name, and the default policy as it stands there."""
    top = {} if marked.value is None else marked.value
    if not isinstance(top, dict) or not isinstance(top.get("pools") or {}, dict):
        text = "the file must be a mapping with the key pools: the names of the pools and what each holds"
        mistakes.append(Mistake(marked.line("pools"), text))
        return {}, None
    mistakes += [Mistake(marked.line(key), _unknown(key, _TOP)) for key in top if key not in _TOP]
    return top.get("pools") or {}, top.get("admission")


def _default_policy(marked: MarkedYaml, given: Any, mistakes: list[Mistake]) -> Policy | None:
    """That of requests without a pool; None without one, or with mistakes."""
    if given is None:
        return None
    if not isinstance(given, dict):
        mistakes.append(Mistake(marked.line("admission"), "admission: Input should be a valid dictionary"))
        return None
    fields = _given(given)
    wrong = objections(fields, for_pool=False)
    mistakes += [Mistake(marked.line("admission", field), f"admission: {text}") for field, text in wrong.items()]
    return None if wrong else policy_of(fields, for_pool=False)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`~` is as if it were not there."""
    return {key: value for key, value in fields.items() if value is not None}


def _read_pool(place: _Place, folder: Path, fields: Any) -> DeclaredPool | None:
    """One pool, or None with mistakes."""
    n_before = len(place.mistakes)
    if not valid_name(place.name):
        place.wrong(f"a name must match {NAME_RULE}")
    if not isinstance(fields, dict):
        place.wrong(f"say what it holds: one of {_WAYS}")
        return None
    fields = _given(fields)
    ways = {field: f"{field}_file" for field in _FROM_FILES if f"{field}_file" in fields}
    _check_together(place, fields, ways)
    named = {way: fields.pop(way) for way in ways.values()}
    fields |= {field: _content(place, folder, field, named[way]) for field, way in ways.items()}
    if fields.get("pin") is True:
        fields["pin"] = {}
    if isinstance(fields.get("admission"), dict):
        fields["admission"] = _given(fields["admission"])
        for field, text in objections(fields["admission"]).items():
            place.wrong(f"admission: {text}", "admission", field)
    for field, text in _unsendable(fields):
        place.wrong(text, ways.get(field, field))
    try:
        pool = DeclaredPool.model_validate(fields)
    except ValidationError as error:
        for field, path, text in _invalid(error):
            place.wrong(f"{ways[field]} {named[ways[field]]}: {text}" if field in ways else text, ways.get(field, field), *path)
        return None
    return pool if len(place.mistakes) == n_before else None


def _check_together(place: _Place, fields: Mapping[str, Any], ways: Mapping[str, str]) -> None:
    """What goes with what, before any file is read."""
    given = [name for field in _SOURCES for name in (field, ways.get(field)) if name is not None and name in fields]
    if len(given) != 1:
        what = f"{' and '.join(given)} came together" if given else "none came"
        place.wrong(f"give exactly one of {_WAYS}; {what}", *given[1:2])
    if "tools" in fields and "tools" in ways:
        place.wrong("tools and tools_file came together; give one of them", "tools_file")
    for name in ("tools", "tools_file", "chat_template_kwargs"):
        if name in fields and given and not {"messages", "messages_file"}.intersection(given):
            place.wrong(f"{name} goes with messages, not with {given[0]}", name)
    if "branch_pos" in fields and "parent" not in fields:
        place.wrong("branch_pos says where it leaves its parent, but no parent is given", "branch_pos")


def _content(place: _Place, folder: Path, field: str, name: object) -> Any:
    """What another file holds for a field: the text as it is, or JSON. None with a mistake."""
    way = f"{field}_file"
    if not isinstance(name, str) or not name:
        place.wrong(f"{way} must be the name of a file", way)
        return None
    try:
        text = _text(folder / name, f"{way} {name}")
        return text if field == "prompt" else json.loads(text)
    except SettingsError as error:
        place.wrong(str(error), way)
    except (ValueError, RecursionError) as error:
        place.wrong(f"{way} {name}: not valid JSON: {error}", way)
    return None


def _text(path: Path, shown: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SettingsError(f"{shown}: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{shown}: not UTF-8 text: {error}") from error


def _unsendable(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What no request can carry: half a character (escapes can spell it), values that YAML has by tags and JSON has not."""
    for field, value in fields.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            yield field, f"{field} holds {error.object[error.start]!a}, an unpaired surrogate, which is no character"
        except (TypeError, ValueError, RecursionError) as error:
            yield field, f"{field} holds what JSON cannot carry: {error}"


def _invalid(error: ValidationError) -> Iterator[tuple[str, tuple[str | int, ...], str]]:
    """The first problem of each field: the field, the way to it from there (no names of types), and what is wrong."""
    seen: set[str] = set()
    for problem in error.errors(include_url=False, include_input=False):
        field, *names = problem["loc"]
        path = tuple(part for part in names if isinstance(part, int) or part in DeclaredPin.model_fields)
        if str(field) in seen:
            continue
        seen.add(str(field))
        if problem["type"] == "extra_forbidden":
            text = _unknown(str(problem["loc"][-1]), DeclaredPin.model_fields if names else _KNOWN)
        elif field == "pin" and not path:
            text = "pin must be true, false, or a mapping with owner and lease_s"
        else:
            shown = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
            text = f"{field}{shown}: {problem['msg']}"
        yield str(field), path, text


def _unknown(key: str, known: Iterable[str]) -> str:
    return f"unknown key {key!r:.80}; known are {', '.join(known)}"


def _parents_first(marked: MarkedYaml, pools: Mapping[str, Any], mistakes: list[Mistake]) -> list[str]:
    """All names, each after its parent. Parents that are not there, and rings of parents, are mistakes."""
    parents = {name: fields.get("parent") for name, fields in pools.items() if isinstance(fields, dict)}
    order: dict[str, None] = {}
    for name in pools:
        line: list[str] = []
        at: Any = name
        while isinstance(at, str) and at in pools and at not in order and at not in line:
            line.append(at)
            at = parents.get(at)
        if at in line:
            ring = line[line.index(at) :]
            text = f"pool {ring[0]}: its parents form a ring: {' -> '.join([*ring, at])}"
            mistakes.append(Mistake(marked.line("pools", ring[0], "parent"), text))
        order |= dict.fromkeys(reversed(line))
    for name, parent in parents.items():
        if isinstance(parent, str) and parent not in pools:
            text = f"pool {name}: its parent {parent!r:.80} is not in this file"
            mistakes.append(Mistake(marked.line("pools", name, "parent"), text))
    return list(order)
