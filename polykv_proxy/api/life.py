"""What a stream that waits to be admitted is sent, so that clients with idle timers do not give it up.

Law: pure; whole events that every client of the route's protocol passes over.
"""

from __future__ import annotations

import json
import time

from polykv_proxy.api.relay.targets import decoded_path
from polykv_proxy.core.admission.policy import WhileHeld

ALIVE_S = 5.0
COMMENT = b": waiting to be admitted\n\n"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def sign_of_life(target: bytes, while_held: WhileHeld) -> bytes | None:
    """Events for a stream of this route; None where nothing is to be sent. A protocol without empty chunks gets a comment."""
    if while_held is WhileHeld.SILENCE:
        return None
    path = decoded_path(target)
    if while_held is WhileHeld.COMMENTS:
        return COMMENT
    if path.endswith(b"/messages"):
        return PING
    if path.endswith(b"chat/completions"):
        return _chunk("chatcmpl-waiting", "chat.completion.chunk")
    if path.endswith(b"/v1/completions"):
        return _chunk("cmpl-waiting", "text_completion")
    return COMMENT


def _chunk(name: str, kind: str) -> bytes:
    chunk = {"id": name, "object": kind, "created": int(time.time()), "model": "", "choices": []}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
