"""A caller's own name for a request, `X-Request-Id`: it goes to the engine and back as it came, and is shown in logs and events.

Law: pure. We make none up: a request that has no id stays without.
"""

from __future__ import annotations

from collections.abc import Iterable

FIELD = b"x-request-id"
_SHOWN = 128


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The id as it came; the first, where there are several."""
    return next((value for name, value in headers if len(name) == len(FIELD) and name.lower() == FIELD), None)


def shown(request_id: bytes | None) -> str | None:
    """The id as a text that harms no log: its beginning, with everything but printable ASCII escaped."""
    if request_id is None:
        return None
    return request_id[:_SHOWN].decode("latin-1").encode("unicode_escape").decode("ascii")
