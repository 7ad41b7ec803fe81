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
        self._said_at: dict[Hashable, float] = {}
        self._unsaid: dict[Hashable, int] = {}

    def warning(self, kind: Hashable, text: str) -> None:
        """Say it, unless one of its kind was said within a minute."""
        now = self._now()
        if now - self._said_at.get(kind, -inf) < EVERY_S:
            self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
            return
        n_unsaid = self._unsaid.pop(kind, 0)
        self._log.warning("%s%s", text, f" ({n_unsaid} more like it before)" if n_unsaid else "")
        self._said_at = {one: at for one, at in self._said_at.items() if now - at < FORGOTTEN_S} | {kind: now}
        self._unsaid = {one: n for one, n in self._unsaid.items() if one in self._said_at}
