"""One look at the raw bytes of a request: can it name a pool or a session?

Law: never parses JSON. A miss must be right; a hit may be wrong, parsing settles it. JSON may spell any key with `\\u` escapes, and
the engine reads it as the same key, so bytes that could spell one of ours are a hit too.
"""

from __future__ import annotations

import re
from collections.abc import Set

_KEYS = re.compile(rb'_(?:id"(?:(?<=pool_id")|(?<=session_id"))|slot"(?<=shared_pool_slot")|n_tokens"(?<=shared_prefix_n_tokens"))')
"""The end of a key of ours. Each begins at a `_`, which is rare: one pass, in half the time of four looks for the whole keys."""
_MODEL = re.compile(rb'"model"\s*:\s*"[^"@\\]*+(?:\\.[^"@\\]*+)*+@', re.DOTALL)
"""A value with an `@`; escapes in front of it (JSON writers that keep to ASCII make them) hide nothing. Never goes back."""
_ESCAPED = re.compile(rb"\\u00[4-7][0-9a-fA-F]")
"""An escaped `@`, letter or `_`: no writer of JSON does that by itself, so it is rare and worth a parse."""
_HEADERS = frozenset({b"x-pool-id", b"x-session-id"})


def names_something(headers: Set[bytes], body: bytes) -> bool:
    """May this request name a pool or a session by a header (their names, in lower case), a key of its body, or its model?"""
    if not _HEADERS.isdisjoint(headers):
        return True
    if _KEYS.search(body) is not None or _ESCAPED.search(body) is not None:
        return True
    return b"@" in body and _MODEL.search(body) is not None
