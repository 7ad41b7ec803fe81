"""Lines of the log: for people and for programs, each with its fields and the id of its request."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os

import pytest

from polykv_proxy.core.request_ids import request_id_of, shown
from polykv_proxy.observability.logs import REQUEST_ID, Aside, Beside, JsonLines, LogLines, TextLines, say


def _logged(formatter: logging.Formatter, call: object) -> str:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    log = logging.Logger("polykv.test", logging.DEBUG)
    log.addHandler(handler)
    call(log)  # type: ignore[operator]
    return out.getvalue()


def test_an_event_is_one_object_a_line() -> None:
    """Whatever is in it: line breaks, quotation marks, a traceback, values of any kind."""

    def speak(log: logging.Logger) -> None:
        say(log, 'a "b"\nc', {"path": "/x y", "ms": 1.5, "none": None, "odd": {1, 2}.__class__})
        log.error("failed", exc_info=ValueError("no\nway"))

    first, second = map(json.loads, _logged(JsonLines(), speak).splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("info", "polykv.test", 'a "b"\nc')
    assert (first["path"], first["ms"], first["none"]) == ("/x y", 1.5, None)
    assert isinstance(first["ts"], float)
    assert "ValueError: no\nway" in second["error"]


def test_a_text_has_its_fields_behind_it() -> None:
    """As name=value, quoted where that is needed."""
    line = _logged(TextLines(), lambda log: say(log, "request", {"path": "/x y", "n": 1, "none": None, "empty": ""}))
    assert line.endswith(' INFO polykv.test: request path="/x y" n=1 none=null empty=""\n')


@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()])
def test_what_is_said_while_a_request_is_worked_on_names_it(formatter: logging.Formatter) -> None:
    """In every line, until it is over."""
    token = REQUEST_ID.set("r-1")
    with_id = _logged(formatter, lambda log: log.warning("x"))
    REQUEST_ID.reset(token)
    assert "r-1" in with_id
    assert "request_id" not in _logged(formatter, lambda log: log.warning("x"))


def test_an_event_may_be_about_another_request() -> None:
    """Or about none."""
    token = REQUEST_ID.set("r-1")
    other = _logged(JsonLines(), lambda log: say(log, "x", {"request_id": "r-2"}))
    none = _logged(JsonLines(), lambda log: say(log, "x", {"request_id": None}))
    REQUEST_ID.reset(token)
    assert json.loads(other)["request_id"] == "r-2"
    assert "request_id" not in json.loads(none)


def test_what_is_printed_for_people_becomes_events() -> None:
    """A line each, however it was written."""

    def speak(log: logging.Logger) -> None:
        out = LogLines(log)
        print("one\n\n  two", file=out)
        out.write("thr")
        out.write("ee\n")

    assert [json.loads(line)["message"] for line in _logged(JsonLines(), speak).splitlines()] == ["one", "two", "three"]


def test_a_log_that_nobody_reads_holds_up_nobody() -> None:
    """Lines wait, then they are dropped; when somebody reads again each is there or among those that are said to be missing."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        handler = Aside(stream, logging.Formatter("%(message)s"), most=100)
        log = logging.Logger("polykv.test")
        log.addHandler(handler)
        for n in range(1000):
            log.warning("%d %s", n, "x" * 1000)
        n_there = n_missing = 0
        with os.fdopen(read) as reader:
            while n_there + n_missing < 1000:
                n, _, what = reader.readline().partition(" ")
                if "missing" in what:
                    n_missing += int(n)
                else:
                    n_there += 1
            handler.close()
    assert n_missing > 500


def test_what_is_printed_beside_a_log_stands_between_its_lines() -> None:
    """As it is, in order, in the stream's encoding; a stream that cannot be written to is no failure of the speaker's."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    handler = Aside(out, logging.Formatter("%(message)s"))
    log, beside = logging.Logger("polykv.test"), Beside(handler, out)
    log.addHandler(handler)
    log.warning("a")
    print("b\nc", file=beside, flush=True)
    beside.write("\x1b[2K")
    log.warning("d")
    assert (beside.encoding, beside.isatty()) == ("latin-1", False)
    handler.close()
    out.seek(0)
    assert out.read() == "a\nb\nc\n\x1b[2Kd\n"
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), os.fdopen(write, "w") as broken:
        handler = Aside(broken, logging.Formatter("%(message)s"))
        print("e", file=Beside(handler, broken), flush=True)
        handler.close()


def test_what_was_said_last_is_still_written() -> None:
    """At the end, in order."""
    out = io.StringIO()
    handler = Aside(out, logging.Formatter("%(message)s"))
    log = logging.Logger("polykv.test")
    log.addHandler(handler)
    for n in range(100):
        log.warning("%d", n)
    handler.close()
    assert out.getvalue().split() == [str(n) for n in range(100)]


def test_an_id_harms_no_log() -> None:
    """Its beginning is shown, and nothing in it is a control character."""
    assert shown(None) is None
    assert shown(b"a\x1b[31m\t\xff" + b"b" * 500) == "a\\x1b[31m\\t\\xff" + "b" * 120
    assert request_id_of([(b"Host", b"h"), (b"X-Request-ID", b"1"), (b"x-request-id", b"2")]) == b"1"
    assert request_id_of([(b"x-request-ix", b"1")]) is None
