"""A client connection of a fuzz: writes asks in pieces, reads replies, says whether the connection can go on.

Law: over TCP or a unix socket alike; never sends a body after `Expect: 100-continue` before it was answered.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.fakes.relay_rig import Client, Reply
from tests.fuzz.asks import Ask

Address = int | Path
_STUCK_S, _HANG_S = 0.5, 30.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True)
class Heard:
    """What came back for one ask. `continued`: it was told to go on before it sent its body."""

    reply: Reply
    continued: bool


class Wire(Client):
    """One connection."""

    def __init__(self, address: Address) -> None:
        if isinstance(address, int):
            super().__init__(address)
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(30)
            self.sock.connect(str(address))
            self.data = b""

    def ask(self, ask: Ask) -> Heard:
        """Send it and read the whole reply."""
        continued = False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused early: the reply says why
            self._send(ask, ask.head if ask.expects else ask.whole)
            if ask.expects:
                while len(self.data) < len(_CONTINUE) and self.more():
                    pass
                continued = self.data.startswith(_CONTINUE)
            if continued:
                self.data = self.data[len(_CONTINUE) :]
                self._send(ask, ask.wire_body)
        return Heard(self.reply(head_only=ask.method == b"HEAD"), continued)

    def row(self, asks: Sequence[Ask]) -> list[Reply]:
        """Send all at once, then read all replies; until the peer closes."""
        for ask in asks:
            self._send(ask, ask.whole)
        heard = []
        with contextlib.suppress(EOFError, ConnectionResetError):
            for ask in asks:
                heard.append(self.reply(head_only=ask.method == b"HEAD"))  # noqa: PERF401 - those before the end count
        return heard

    def goes_on(self, ask: Ask) -> bool:
        """Is another request answered on this connection?"""
        try:
            return self.ask(ask).reply.complete
        except (EOFError, OSError):
            return False

    def soon(self) -> bytes:
        """What comes within a moment, or nothing: what is no whole request is waited for."""
        self.sock.settimeout(0.2)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            self.more()
        return self.data

    def _send(self, ask: Ask, data: bytes) -> None:
        """Reads when it cannot write; ends when the peer has answered and takes no more: it may leave the rest of a body unread."""
        for piece in ask.pieces(data):
            left = memoryview(piece)
            while left:
                readable, writable, _ = select.select([self.sock], [self.sock], [], _STUCK_S if self.data else _HANG_S)
                if writable:
                    left = left[self.sock.send(left) :]
                elif not readable and not self.data:
                    raise TimeoutError(f"{len(left)} bytes of a request are not taken")
                elif not readable or not self.more():
                    return

    def __enter__(self) -> Self:
        return self
