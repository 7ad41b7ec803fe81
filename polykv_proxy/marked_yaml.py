"""YAML whose values know the lines they stand on.

Law: plain data only, and the plain words of YAML 1.2: `true`, `false`, `null` and numbers are values, all else without quotes is
text (`no`, `12:30` and dates too). A key that comes twice, or is no text, is a mistake; all are found, not the first alone. What is
left without them is a value, so that it can be looked through for other mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
MAX_PARTS = 2_000_000
"""Values, or 32 characters of a text, with each alias written out: about what a request may have."""


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
    """One document: its `value` (None where it cannot be read at all), the `mistakes` in it, and where its parts stand."""

    def __init__(self, text: str) -> None:
        self.value: Any = None
        self.mistakes: list[Mistake] = []
        self._root: yaml.Node | None = None
        try:
            loader = _Loader(text)
            self._root = loader.get_single_node()
            if self._root is not None:
                self.value = self._read(loader, self._root)
        except yaml.YAMLError as error:
            self.mistakes.append(_explained(error))
        except RecursionError:
            self.mistakes.append(Mistake(1, "nested too deeply"))

    def _read(self, loader: Any, root: yaml.Node) -> Any:
        """1. what has no end, or is too large: a mistake and no value. 2. what is wrong with keys: left out. 3. the rest."""
        self.mistakes += _too_much(root)
        if self.mistakes:
            return None
        self.mistakes += _without_bad_keys(root)
        return loader.construct_document(root)

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


def _too_much(root: yaml.Node) -> list[Mistake]:
    """Aliases to what they stand in, or that make a few lines into millions of parts."""
    sizes: dict[int, int] = {}
    waiting: list[tuple[yaml.Node, frozenset[int]]] = [(root, frozenset())]
    while waiting:
        node, around = waiting[-1]
        inside = around | {id(node)}
        children = [child for child in _children(node) if id(child) not in sizes]
        ring = next((child for child in children if id(child) in inside), None)
        if ring is not None:
            return [Mistake(_line(ring), "an alias in here stands for what it stands in")]
        if children:
            waiting += [(child, inside) for child in children]
            continue
        waiting.pop()
        sizes[id(node)] = _own_size(node) + sum(sizes[id(child)] for child in _children(node))
        if sizes[id(node)] > MAX_PARTS:
            return [Mistake(_line(node), "written out, with all its aliases, this is larger than a request may be")]
    return []


def _without_bad_keys(root: yaml.Node) -> Iterator[Mistake]:
    """Take out keys that come twice or are no text, once for each mapping, however often it is referred to."""
    done: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in done:
            continue
        done.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield from _take_out_bad_keys(node)
        waiting += _children(node)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [value for _, value in node.value]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _own_size(node: yaml.Node) -> int:
    return 1 + (len(node.value) // 32 if isinstance(node, yaml.ScalarNode) else 0)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _take_out_bad_keys(node: yaml.MappingNode) -> Iterator[Mistake]:
    seen: dict[str, int] = {}
    good = []
    for key, value in node.value:
        line = _line(key)
        if key.tag == _MERGE:
            good.append((key, value))
        elif key.tag != _TEXT:
            quoted = f": write {key.value!r:.60} in quotes" if isinstance(key, yaml.ScalarNode) else ""
            yield Mistake(line, f"a key must be a text{quoted}")
        elif key.value in seen:
            yield Mistake(line, f"{key.value!r:.80} is there twice, first on line {seen[key.value]}")
        else:
            seen[key.value] = line
            good.append((key, value))
    node.value = good


def _explained(error: yaml.YAMLError) -> Mistake:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    parts = [getattr(error, name, None) for name in ("context", "problem")]
    text = ", ".join(part for part in parts if part) or str(error).replace("\n", " ")
    return Mistake(mark.line + 1 if mark is not None else 1, f"not valid YAML: {text}")
