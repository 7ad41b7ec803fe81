"""Rows of sessions that rest, made once: a look at thousands of them costs what those cost that work.

Law: a row is kept for exactly what it was made of, held against it by identity (records and figures are never changed, only
replaced). Who holds cells, or works, is never kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from polykv_proxy.core.sessions import Session
from polykv_proxy.core.throughput import Speed

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class _Kept(Generic[Row]):
    session: Session
    speed: Speed | None
    n_ctx: int | None
    row: Row


class Resting(Generic[Row]):
    """One kind of row. A look begins with `begin`; what it does not ask for is forgotten with the next."""

    def __init__(self) -> None:
        self._before: dict[int, _Kept[Row]] = {}
        self._now: dict[int, _Kept[Row]] = {}

    def begin(self) -> None:
        """Another look."""
        self._before, self._now = self._now, {}

    def row(self, session: Session, speed: Speed | None, n_ctx: int | None, make: Callable[[], Row]) -> Row:
        """The row that was made of these, or a new one. The session must be at rest, without cells."""
        kept = self._before.get(session.number)
        if kept is None or kept.session is not session or kept.speed is not speed or kept.n_ctx != n_ctx:
            kept = _Kept(session, speed, n_ctx, make())
        self._now[session.number] = kept
        return kept.row
