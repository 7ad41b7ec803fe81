"""YAML with lines: plain data, YAML 1.2's words, and every mistake with the line it stands on."""

from __future__ import annotations

import pytest

from polykv_proxy.marked_yaml import MarkedYaml


def test_words_and_numbers_are_those_of_yaml_1_2() -> None:
    """Only true, false, null and decimal numbers are values; all other plain words are text."""
    text = "[yes, no, on, y, True, true, null, ~, 12:30, 2024-01-01, 010, 0x1f, 1_000, 10, -3, 1.5, .5, 1e3, .inf, '7', =, 1.]"
    marked = MarkedYaml(text)
    assert marked.mistakes == []
    words = ["yes", "no", "on", "y", "True", True, None, None, "12:30", "2024-01-01", "010", "0x1f", "1_000"]
    assert marked.value == [*words, 10, -3, 1.5, 0.5, 1000.0, ".inf", "7", "=", 1.0]


def test_parts_know_their_lines() -> None:
    """A line is that of the key or item, or of the last part of the path that is there."""
    marked = MarkedYaml("a: 1\npools:\n  x:\n    list:\n      - 1\n      - q: 2\n  y: {z: 3}\n")
    assert [marked.line(*path) for path in ((), ("pools", "x", "list", 1), ("pools", "x", "list", 9), ("pools", "y", "z"))] == [
        1,
        6,
        4,
        7,
    ]
    assert marked.line("nothing") == 1


BROKEN = [
    ("a: &x\n  b: [*x]\n", [(1, "an alias in here stands for what it stands in")]),
    ("a: &x {<<: *x}\n", [(1, "an alias in here stands for what it stands in")]),
    ("a: 1\nb: [\n", [(3, "not valid YAML: while parsing a flow node, did not find expected node content")]),
    ("a: 1\n---\nb: 2\n", [(2, "not valid YAML: expected a single document in the stream, but found another document")]),
    ("[" * 5000, [(1, "not valid YAML: while increasing flow level, exceeded maximum nesting depth")]),
]


@pytest.mark.parametrize(("text", "mistakes"), BROKEN)
def test_what_cannot_be_read_says_where(text: str, mistakes: list[tuple[int, str]]) -> None:
    """The line and why; then there is no value."""
    marked = MarkedYaml(text)
    assert [(mistake.line, mistake.text) for mistake in marked.mistakes] == mistakes
    assert marked.value is None


def test_bad_keys_are_all_found_and_left_out() -> None:
    """Each with its line; the rest is a value, whose own mistakes can be found."""
    marked = MarkedYaml("a: 1\nb:\n  c: 1\n  c: 2\na: 3\ntrue: b\nd: [1, {1: x}]\n")
    assert sorted((mistake.line, mistake.text) for mistake in marked.mistakes) == [
        (4, "'c' is there twice, first on line 3"),
        (5, "'a' is there twice, first on line 1"),
        (6, "a key must be a text: write 'true' in quotes"),
        (7, "a key must be a text: write '1' in quotes"),
    ]
    assert marked.value == {"a": 1, "b": {"c": 1}, "d": [1, {}]}


def bomb(levels: int, wide: int, item: str) -> str:
    """Each level is `wide` times the one before."""
    lines = [f"l0: &l0 {item}"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * wide)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (bomb(9, 9, "[x, x]"), 8),
        (bomb(40, 9, "x"), 8),
        (bomb(9, 9, "x").replace("[", "{<<: [").replace("]", "]}").replace("&l0 x", "&l0 {k: v}"), 8),
        (bomb(4, 99, "x" * 3200), 4),
    ],
)
def test_aliases_that_would_fill_the_memory_are_refused(text: str, line: int) -> None:
    """Few lines, millions of parts, or long texts many times: the line on which it is too much, and no value."""
    marked = MarkedYaml(text)
    assert [(mistake.line, mistake.text) for mistake in marked.mistakes] == [
        (line, "written out, with all its aliases, this is larger than a request may be")
    ]
    assert marked.value is None


def test_objects_are_never_made() -> None:
    """A tag that would run code is a mistake."""
    (mistake,) = MarkedYaml("a: !!python/object/apply:os.system ['true']").mistakes
    assert "could not determine a constructor" in mistake.text


def test_aliases_and_merges_are_plain_values() -> None:
    """What is written once can stand in several places."""
    assert MarkedYaml("a: &x {p: 1}\nb: *x\nc: {<<: *x, q: 2}\n").value == {"a": {"p": 1}, "b": {"p": 1}, "c": {"p": 1, "q": 2}}
