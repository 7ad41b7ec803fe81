"""Figures and bars in characters.

Law: pure; what is not known is empty or a dash, never NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"
UNKNOWN = "-"


def rate(value: float | None) -> str:
    """Tokens per second."""
    return UNKNOWN if value is None or not isfinite(value) else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def size(n_bytes: float | None) -> str:
    """Bytes."""
    if n_bytes is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" or n_bytes >= 100 else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def seconds(value: float | None) -> str:
    """A length of time."""
    if value is None:
        return ""
    if value < 120:
        return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:,.1f} h"


def bar(value: float, largest: float, width: int) -> str:
    """`value` as a bar, `width` characters for the largest; anything above zero is seen."""
    if value <= 0 or largest <= 0:
        return ""
    eighths = width * 8 if value >= largest else max(1, round(value / largest * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def parts(values: Sequence[float], width: int) -> list[int]:
    """How many characters of `width` each value gets: their sum is `width`, and what is above zero has one if there is room."""
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    wanted = [value / total * width for value in values]
    given = [max(1, int(one)) if value > 0 else 0 for one, value in zip(wanted, values, strict=True)]
    while (missing := width - sum(given)) > 0:
        given[max(range(len(given)), key=lambda n: wanted[n] - given[n])] += 1
    for _ in range(-missing):
        given[max(range(len(given)), key=lambda n: given[n] - wanted[n] if given[n] > 1 else -width)] -= 1
    return given


def spark(values: Sequence[float | None]) -> str:
    """Values over time, from zero to the largest; a gap is a space."""
    largest = max((value for value in values if value is not None), default=0.0)
    if largest <= 0:
        return "".join(" " if value is None else _HEIGHTS[0] for value in values)
    return "".join(" " if value is None else _HEIGHTS[min(7, int(value / largest * 7.99))] for value in values)
