"""What the engine prints: the last lines, bounded, and all of it in a file where one is wanted.

Law: written by one reader thread, read from anywhere; it never blocks the engine and never grows without bound. The last lines
are shown and logged, so what an error message quotes of a request is left out of them; the file has everything.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger(__name__)
_LINE_LIMIT = 1000
_TOLD = re.compile(r'(got exception: .*?"message":")(?:[^"\\]|\\.)*')
"""An error as the engine logs it: the message went to the client, and may quote what that sent."""


class OutputLog:
    """A ring of the last `n_lines` lines. `n_bytes` only grows: it shows that the engine still says something."""

    def __init__(self, *, n_lines: int = 400, file: Path | None = None) -> None:
        self.n_bytes = 0
        self._lines: deque[str] = deque(maxlen=n_lines)
        self._partial = b""
        self._lock = threading.Lock()
        self._gap = False
        self._file: BinaryIO | None = _opened(file) if file is not None else None

    def feed(self, data: bytes) -> None:
        """Bytes as the engine wrote them."""
        with self._lock:
            self.n_bytes += len(data)
            *whole, rest = (self._partial + data).split(b"\n")
            self._partial = rest[:_LINE_LIMIT]  # its beginning says what it is
            self._lines.extend(_text(line) for line in whole)
        if self._file is not None:
            self._write(self._file, data)

    def _write(self, file: BinaryIO, data: bytes) -> None:
        """What cannot be written is missing there, and is said once: who stopped reading would make the engine stand still."""
        try:
            file.write(data)
        except OSError as error:
            if not self._gap:
                _log.warning("what the engine prints cannot be written to its log: %s; there will be a gap", error.strerror)
            self._gap = True
        else:
            self._gap = False

    def tail(self, n: int = 20) -> list[str]:
        """The last lines, an unfinished one included."""
        with self._lock:
            lines = [*self._lines, *([_text(self._partial)] if self._partial else [])]
        return lines[-n:] if n > 0 else []

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _opened(file: Path) -> BinaryIO:
    """To append to; made for its owner's eyes only: with --verbose an engine prints prompts."""
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab", buffering=0)


def _text(line: bytes) -> str:
    text = line[:_LINE_LIMIT].decode("utf-8", "replace").rstrip("\r")
    return _TOLD.sub(r"\1(as told to the client)", text) if "got exception" in text else text
