"""Fields added to JSON that somebody else wrote: every byte of theirs stays where it was.

Law: pure; a body that is not of the expected form gives None, and so stays what it is. A field that is there already is theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


def into_object(raw: bytes, fields: Mapping[str, object]) -> bytes | None:
    """An object with these fields at its end."""
    text = _text(raw)
    start = _skip(text, 0)
    found, end = _value(text, start)
    if not isinstance(found, dict) or _skip(text, end) != len(text):
        return None
    return (text[: end - 1] + _more(found, fields) + text[end - 1 :]).encode()


def into_each(raw: bytes, fields_of: Callable[[Mapping[str, Any]], Mapping[str, object]]) -> bytes | None:
    """An array of objects, each with fields of its own at its end."""
    text = _text(raw)
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        return None
    parts: list[str] = []
    done = 0
    at = _skip(text, at + 1)
    while text[at : at + 1] != "]" or parts:
        found, end = _value(text, at)
        if not isinstance(found, dict):
            return None
        parts += [text[done : end - 1], _more(found, fields_of(found))]
        done, at = end - 1, _skip(text, end)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            return None
        at = _skip(text, at + 1)
    if _skip(text, at + 1) != len(text):
        return None
    return ("".join(parts) + text[done:]).encode()


def _more(there: Mapping[str, object], fields: Mapping[str, object]) -> str:
    added = {name: value for name, value in fields.items() if name not in there}
    if not added:
        return ""
    return ("," if there else "") + json.dumps(added, separators=(",", ":"), allow_nan=False)[1:-1]


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""


def _value(text: str, at: int) -> tuple[object, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space is not None else at
