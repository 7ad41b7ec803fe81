"""Speeds as JSON text: of the engine as a whole, and of each session, or of those that run.

Law: says what the view says. A row that is the same as in the last text is not written anew.
"""

from __future__ import annotations

import json

from polykv_proxy.runtime.rows import SessionRow, StateView, as_json


class TpsTexts:
    """Writes one view after the other."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[SessionRow, str]] = {}

    def text(self, view: StateView, *, running: bool = False) -> str:
        """`running`: only sessions that are not idle."""
        head = _json({"ts": view.ts, "seq": view.seq, "linked": view.linked, **as_json(view.whole)})
        rows = (self._running if running else self._all)(view)
        return f'{head[:-1]},"sessions":[{",".join(rows)}]}}'

    def _running(self, view: StateView) -> list[str]:
        return [self._row(row)[1] for row in view.sessions if row.state != "idle"]

    def _all(self, view: StateView) -> list[str]:
        self._kept = {id(row): self._row(row) for row in view.sessions}
        return [text for _, text in self._kept.values()]

    def _row(self, row: SessionRow) -> tuple[SessionRow, str]:
        return self._kept.get(id(row)) or (row, _json(as_json(row)))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
