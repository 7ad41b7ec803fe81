"""What the proxy says on standard error: one line an event, as text or as JSON, with the id of the request that it is about.

Law: nothing here knows what is said. Bodies, prompts and keys are nobody's to log, at any level.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Literal, TextIO

REQUEST_ID: ContextVar[str | None] = ContextVar("polykv_request_id", default=None)
"""Of the request that is being worked on, in the form that is shown."""

LogFormat = Literal["text", "json"]
_OTHERS = ("httpx", "httpcore", "httpx2", "httpcore2", "asyncio", "uvicorn.error", "opentelemetry")
"""Libraries that would say at every call what we say where it matters, headers and bodies included."""


def set_up(level: str, form: LogFormat) -> None:
    """Once, for this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in _OTHERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def say(log: logging.Logger, event: str, fields: Mapping[str, object]) -> None:
    """An event with fields: names of their own in JSON, `name=value` in a text."""
    log.info(event, extra={"fields": fields})


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


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = {"request_id": REQUEST_ID.get(), **getattr(record, "fields", {})}
    if fields["request_id"] is None:
        del fields["request_id"]
    return fields


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if text and not set(text) & set(' "=') else json.dumps(text)
