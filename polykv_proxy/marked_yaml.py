"""YAML whose values know the lines they stand on.

Law: plain data only, and the plain words of YAML 1.2: `true`, `false`, `null` and numbers are values, all else without quotes is
text (`no`, `12:30` and dates too). A key that comes twice, or is no text, is a mistake; all are found, not the first alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

_SCALARS = {
    "null": (r"~|null|", ["~", "n", ""]),
    "bool": (r"true|false", ["t", "f"]),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    "float": (r"[-+]?(?:[0-9]+(?=[.eE])|(?=\.[0-9]))(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    "merge": (r"<<", ["<"]),
}
_TEXT = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's way to begin without those of YAML 1.1


for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})\\Z"), _first)


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong on a line; lines begin at 1."""

    line: int
    text: str


class MarkedYaml:
    """One document: its `value`, the `mistakes` in it (then `value` is None), and where its parts stand."""

    def __init__(self, text: str) -> None:
        self.value: Any = None
        self.mistakes: list[Mistake] = []
        self._root: yaml.Node | None = None
        try:
            loader = _Loader(text)
            self._root = loader.get_single_node()
            self.mistakes += _mistakes(self._root)
            if self._root is not None and not self.mistakes:
                self.value = loader.construct_document(self._root)
        except yaml.YAMLError as error:
            self.mistakes.append(_explained(error))
        except RecursionError:
            self.mistakes.append(Mistake(1, "nested too deeply"))

    def line(self, *path: str | int) -> int:
        """The line of the key or item that `path` leads to, or of the last part of it that is there."""
        line, node = 1, self._root
        for part in path:
            found = next((place for key, place in _parts(node) if key == part), None)
            if found is None:
                break
            line, node = found
        return line


def _parts(node: yaml.Node | None) -> Iterator[tuple[str | int, tuple[int, yaml.Node]]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key.value, (key.start_mark.line + 1, value)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield number, (item.start_mark.line + 1, item)


def _mistakes(root: yaml.Node | None) -> list[Mistake]:
    """Keys that come twice or are no text, and aliases to what they stand in."""
    found: list[Mistake] = []
    done: set[int] = set()
    waiting: list[tuple[yaml.Node, frozenset[int]]] = [(root, frozenset())] if root is not None else []
    while waiting:
        node, around = waiting.pop()
        line = node.start_mark.line + 1
        if id(node) in around:
            found.append(Mistake(line, "an alias in here stands for what it stands in"))
        if id(node) in done or isinstance(node, yaml.ScalarNode):
            continue
        done.add(id(node))
        children, inside = node.value, around | {id(node)}
        if isinstance(node, yaml.MappingNode):
            found += _bad_keys([key for key, _ in node.value])
            children = [value for _, value in node.value]
        waiting += [(child, inside) for child in children]
    return found


def _bad_keys(keys: Sequence[yaml.Node]) -> Iterator[Mistake]:
    seen: dict[str, int] = {}
    for key in keys:
        line = key.start_mark.line + 1
        if key.tag == _MERGE:
            continue
        if key.tag != _TEXT:
            quoted = f": write {key.value!r:.60} in quotes" if isinstance(key, yaml.ScalarNode) else ""
            yield Mistake(line, f"a key must be a text{quoted}")
        elif key.value in seen:
            yield Mistake(line, f"{key.value!r:.80} is there twice, first on line {seen[key.value]}")
        else:
            seen[key.value] = line


def _explained(error: yaml.YAMLError) -> Mistake:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    parts = [getattr(error, name, None) for name in ("context", "problem")]
    text = ", ".join(part for part in parts if part) or str(error).replace("\n", " ")
    return Mistake(mark.line + 1 if mark is not None else 1, f"not valid YAML: {text}")
