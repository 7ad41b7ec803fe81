"""What is equal of two replies: all but fields of one connection and, of a real engine, what it draws or measures anew."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.fakes.relay_rig import Reply

_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding"})
_CLOCKS = r"created|created_at|completed_at|time_ms|(?:prompt|predicted)_(?:ms|per_token_ms|per_second)"
_NEW: Sequence[tuple[re.Pattern[bytes], bytes]] = [
    (re.compile(rf'"({_CLOCKS}|id_task|t_[a-z_]+)":[-0-9.e+]+'.encode()), rb'"\1":0'),
    (re.compile(rb'"(id|item_id|call_id|tool_call_id)":"[^"]*"'), rb'"\1":""'),
]
"""Random ids, clocks, numbers of tasks."""


@dataclass(frozen=True)
class Face:
    """A reply as it is compared."""

    line: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    complete: bool


def face(reply: Reply, *, drawn: bool = False) -> Face:
    """`drawn`: of a real engine. The length of a body is compared by itself, since drawn figures differ in length."""
    line, *rest = reply.head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    headers = []
    for field in rest:
        name, _, value = field.partition(b":")
        if name.lower() not in _HOP:
            headers.append((name, value.strip()))
    body = normal(reply.body) if drawn else reply.body
    if drawn:
        headers = [(name, b"*" if name.lower() == b"content-length" and reply.body else value) for name, value in headers]
    return Face(line, headers, body, reply.complete)


def difference(want: Face, got: Face) -> str:
    """Where two faces part; empty when they are equal."""
    if want == got:
        return ""
    if (want.line, want.headers, want.complete) != (got.line, got.headers, got.complete):
        return (
            f"want {want.line!r} {want.headers} complete={want.complete}\ngot  {got.line!r} {got.headers} complete={got.complete}"
        )
    at = next(
        (n for n, pair in enumerate(zip(want.body, got.body, strict=False)) if pair[0] != pair[1]),
        min(len(want.body), len(got.body)),
    )
    near = slice(max(0, at - 80), at + 80)
    return f"at byte {at} of {len(want.body)} and {len(got.body)}:\nwant {want.body[near]!r}\ngot  {got.body[near]!r}"


def normal(body: bytes) -> bytes:
    """A body of a real engine without what it draws or measures anew."""
    for pattern, fixed in _NEW:
        body = pattern.sub(fixed, body)
    return body


def length_is_true(reply: Reply) -> bool:
    """Does a reply with a length and a body have that many bytes?"""
    said = reply.header(b"content-length")
    return not said or not reply.body or int(said[0]) == len(reply.body)
