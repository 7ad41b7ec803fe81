"""Metric families as bytes, in the two forms that Prometheus reads.

Law: one exposition, no family twice: first the engine's, then ours. Between parts the event loop may run, so that no page holds up
a stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest as as_text
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as as_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as strictly

from polykv_proxy.observability.engine_page import EnginePage

_PART_SAMPLES = 50
_NO = re.compile(r"q=0(?:\.0*)?")
_END = b"# EOF\n"


class Form(Enum):
    """A form, by its content type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def form_of(accept: str) -> Form:
    """The form that an `Accept` header asks for."""
    return Form.OPENMETRICS if _takes(accept, "application/openmetrics-text") else Form.TEXT


def takes_gzip(accept_encoding: str) -> bool:
    """Does an `Accept-Encoding` header name it?"""
    return _takes(accept_encoding, "gzip")


def _takes(header: str, name: str) -> bool:
    """Is the name listed, and not with a weight of zero?"""
    listed = [[part.strip() for part in one.split(";")] for one in header.lower().split(",")]
    return any(found == name and not any(_NO.fullmatch(part) for part in more) for found, *more in listed)


def parts(form: Form, engine: EnginePage, ours: Iterable[Metric]) -> Iterator[bytes]:
    """An exposition in parts, each of which is made in no time."""
    if form is Form.TEXT:
        yield engine.text
    else:
        yield b"".join(_sound(family) for family in engine.families)
    batch: list[Metric] = []
    for family in ours:
        batch.append(family)
        if sum(len(one.samples) for one in batch) >= _PART_SAMPLES:
            yield _rendered(form, batch)
            batch = []
    yield _rendered(form, batch)
    if form is Form.OPENMETRICS:
        yield _END


class _Families(CollectorRegistry):
    """What the library renders from."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _rendered(form: Form, families: Iterable[Metric]) -> bytes:
    if form is Form.TEXT:
        return as_text(_Families(families))
    # any other escaping makes an underscore of the colons that our names have
    made: bytes = as_openmetrics(_Families(families), ALLOWUTF8)  # type: ignore[no-untyped-call]  # the library types its text form only
    return made.removesuffix(_END)


def _sound(family: Metric) -> bytes:
    """A family of the engine's; none where OpenMetrics has rules that it does not follow."""
    try:
        lines = _rendered(Form.OPENMETRICS, [family])
        list(strictly((lines + _END).decode()))  # type: ignore[no-untyped-call]  # as above
    except ValueError:
        return b""
    return lines
