"""A reply that is kept back until it is whole, because something is added to it.

Law: nothing is sent meanwhile; a reply that is too long, or to which nothing can be added, goes as it came.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from polykv_proxy.api.relay.heads import Framing, has_line_break
from polykv_proxy.api.relay.reply import ReplyHead

_log = logging.getLogger(__name__)
LIMIT = 4 * 1024 * 1024


@dataclass(slots=True)
class Held:
    """The head as it came, the body so far, and what makes another body of the whole one."""

    head: ReplyHead
    amend: Callable[[bytes], bytes | None]
    body: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> bool:
        """More of the body; False when it is too long to be kept."""
        self.body += data
        return len(self.body) <= LIMIT

    def whole(self) -> tuple[ReplyHead, bytes]:
        """Head and body to send, now that all is there."""
        try:
            made = self.amend(bytes(self.body))
        except Exception:
            _log.exception("nothing is added to a page of the engine")
            made = None
        if made is None:
            return self.head, bytes(self.body)
        kept = [(name, value) for name, value in self.head.headers if name.lower() != b"content-length"]
        headers = [*kept, (b"Content-Length", b"%d" % len(made))]
        return self.head._replace(headers=headers, framing=Framing(length=len(made))), made


def can_be_held(head: ReplyHead) -> bool:
    """Is it a whole page of plain JSON, with a head that can be relayed?"""
    fields = {name.lower(): value.lower() for name, value in head.headers}
    plain = fields.get(b"content-type", b"").startswith(b"application/json") and b"content-encoding" not in fields
    return head.status == 200 and plain and not head.bodiless and not has_line_break(head.headers)
