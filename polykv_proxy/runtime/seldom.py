"""Warnings that many requests have in common.

Law: the first is said at once, what follows within a minute is counted and told with the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from math import inf

EVERY_S = 60.0
FORGOTTEN_S = 3600.0
"""Kinds of which nothing was said for so long leave nothing in memory."""


class Seldom:
    """One logger's. `now` is a steady clock in seconds."""

    def __init__(self, log: logging.Logger, now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self._seen: dict[Hashable, tuple[float, int]] = {}
        """When one of each kind was said last, and how many have not been since."""

    def warning(self, kind: Hashable, text: str) -> None:
        """Say it, unless one of its kind was said within a minute."""
        now = self._now()
        said_at, n_unsaid = self._seen.get(kind, (-inf, 0))
        if now - said_at < EVERY_S:
            self._seen[kind] = (said_at, n_unsaid + 1)
            return
        self._log.warning("%s%s", text, f" ({n_unsaid} more like it before)" if n_unsaid else "")
        self._seen = {one: seen for one, seen in self._seen.items() if now - seen[0] < FORGOTTEN_S} | {kind: (now, 0)}
