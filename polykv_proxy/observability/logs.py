"""What the proxy says on standard error: one line an event, as text or as JSON, with the id of the request that it is about.

Law: nothing here knows what is said. Bodies, prompts and keys are nobody's to log, at any level.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import queue
import sys
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from logging.handlers import QueueHandler
from typing import Literal, TextIO

REQUEST_ID: ContextVar[str | None] = ContextVar("polykv_request_id", default=None)
"""Of the request that is being worked on, in the form that is shown."""

_LAST_S = 1.0
LogFormat = Literal["text", "json"]
_OTHERS = ("httpx", "httpcore", "httpx2", "httpcore2", "asyncio", "uvicorn.error", "opentelemetry")
"""Libraries that would say at every call what we say where it matters, headers and bodies included."""


def set_up(level: str, form: LogFormat) -> TextIO:
    """Once, for this process. What is printed for people goes to the stream that this gives: it never waits and never fails."""
    aside = Aside(sys.stderr, JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[aside], force=True)
    for name in _OTHERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    return LogLines(logging.getLogger("polykv")) if form == "json" else Beside(aside, sys.stderr)


def say(log: logging.Logger, event: str, fields: Mapping[str, object]) -> None:
    """An event with fields: names of their own in JSON, `name=value` in a text."""
    log.info(event, extra={"fields": fields})


class Aside(QueueHandler):
    """Lines are made where they are said and written by a thread: a terminal that is held still, or a pipe that nobody reads, holds
    up nobody. Beyond `most` waiting lines the newest are dropped, and how many is said.
    """

    def __init__(self, stream: TextIO, formatter: logging.Formatter, most: int = 10_000) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(most)
        super().__init__(self._lines)
        self.setFormatter(formatter)
        self._stream = stream
        self._n_dropped = 0
        self._writer = threading.Thread(target=self._write, name="polykv-log", daemon=True)
        self._writer.start()

    def prepare(self, record: logging.LogRecord) -> str:
        """The line; whoever says it still knows the request."""
        return self.format(record)

    def enqueue(self, record: str) -> None:  # type: ignore[override] # what prepare makes
        """Never waits."""
        self.pass_on(record + "\n")

    def pass_on(self, text: str) -> None:
        """Have it written as it is. Never waits."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._n_dropped += 1

    def close(self) -> None:
        """What waits is written, if that takes no longer than a moment."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_LAST_S)
        self._writer.join(_LAST_S)
        super().close()

    def _write(self) -> None:
        n_told = 0
        while (text := self._lines.get()) is not None:
            self._put(text)
            if (n_dropped := self._n_dropped) > n_told:
                what = "%d lines of this log are missing: they were not read in time"
                told = logging.LogRecord("polykv", logging.WARNING, "", 0, what, (n_dropped - n_told,), None)
                self._put(self.format(told) + "\n")
                n_told = n_dropped

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            self._stream.write(text)
            self._stream.flush()


class TextLines(logging.Formatter):
    """For people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """The line without a traceback."""
        fields = "".join(f" {name}={_plain(value)}" for name, value in _fields(record).items())
        return super().formatMessage(record) + fields


class JsonLines(logging.Formatter):
    """For programs: an object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, a traceback in its field `error`."""
        line: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LogLines(io.TextIOBase, TextIO):
    """A text stream whose lines are events of a log: what is printed for people stays readable by programs."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._rest = ""

    def write(self, text: str) -> int:
        """Say each line that is whole."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(None, map(str.strip, lines)):
            self._log.info("%s", line)
        return len(text)


class Beside(io.TextIOBase, TextIO):
    """The stream of a log for what is no event of it: written between its lines, as it is, by the same thread."""

    def __init__(self, aside: Aside, stream: TextIO) -> None:
        self._aside = aside
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Is the stream a terminal?"""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """Never waits, never fails."""
        self._aside.pass_on(text)
        return len(text)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = {"request_id": REQUEST_ID.get(), **getattr(record, "fields", {})}
    if fields["request_id"] is None:
        del fields["request_id"]
    return fields


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if text and not set(text) & set(' "=') else json.dumps(text)
