"""The engine's own metrics page, checked and made fit to stand in one exposition with ours.

Law: pure. Lines stay as they came, but for not-a-number, which only Python spells in more than one way. Families under our prefixes
are left out: a name stands once. A page that a strict reader would refuse is refused whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

OUR_PREFIXES = ("polykv_", "opencoti_polykv:", "vllm:")
MAX_BYTES = 1 << 20

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_COMMENT = re.compile(rf"# (?:HELP|TYPE) ({_NAME})(?: .*)?")
_SAMPLE = re.compile(rf"({_NAME})((?:\{{.*\}})?[ \t]+)(\S+)((?:[ \t]+-?[0-9]+)?)[ \t]*")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?[iI]nf(?:inity)?")
_NAN = re.compile(r"[+-]?nan(?:\(.*\))?", re.IGNORECASE)


class BadPageError(ValueError):
    """This is no metrics page. The message says where."""


@dataclass(frozen=True, slots=True)
class EnginePage:
    """`text` in the engine's lines; `families` are the same, for other forms (where the samples of a counter end in `_total`)."""

    text: bytes = b""
    families: tuple[Metric, ...] = ()

    def value(self, name: str) -> float | None:
        """The first sample of that name, if it is a number."""
        found = (sample.value for family in self.families for sample in family.samples if sample.name == name)
        return next((value for value in found if isfinite(value)), None)


def read_page(raw: bytes) -> EnginePage:
    """A page as the engine sent it. BadPageError when strict readers would refuse it."""
    if len(raw) > MAX_BYTES:
        raise BadPageError(f"it is longer than {MAX_BYTES} bytes")
    try:
        kept = list(_checked(raw.decode()))
        text = "".join(f"{line}\n" for line in kept)
        families = tuple(text_string_to_metric_families(text))
    except BadPageError:
        raise
    except Exception as error:
        raise BadPageError(f"it cannot be parsed: {type(error).__name__} {error}") from error
    _once("metric", [family.name for family in families])
    _once("sample", [(sample.name, tuple(sorted(sample.labels.items()))) for family in families for sample in family.samples])
    return EnginePage(text.encode(), families)


def _checked(text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        comment, sample = _COMMENT.fullmatch(line), _SAMPLE.fullmatch(line)
        if sample is not None:
            name, labels, value, stamp = sample.groups()
            value = "NaN" if _NAN.fullmatch(value) else value
            if value != "NaN" and not _NUMBER.fullmatch(value):
                raise BadPageError(f"line {number}: {value[:40]!r} is no number")
            if not name.startswith(OUR_PREFIXES):
                yield f"{name}{labels}{value}{stamp}"
        elif comment is not None:
            if not comment[1].startswith(OUR_PREFIXES):
                yield line
        elif line.strip() and not line.startswith("#"):
            raise BadPageError(f"line {number} is neither a comment nor a sample: {line[:40]!r}")


def _once(what: str, names: list[object]) -> None:
    twice = next((name for n, name in enumerate(names) if name in names[:n]), None)
    if twice is not None:
        raise BadPageError(f"{what} {twice} comes twice")
