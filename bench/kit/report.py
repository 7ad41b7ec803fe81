"""What a bench says: tables while it goes, and one JSON line last.

Law: `ok` is true exactly when every goal is met; a goal that was not measured is not met.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """Collects figures and goals of one bench. Metrics are flat: name (unit at its end) to number."""

    bench: str
    metrics: dict[str, float] = field(default_factory=dict)
    goals: dict[str, dict[str, Any]] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        self.metrics[name] = value if isinstance(value, int) else round(value, 5)

    def at_most(self, name: str, limit: float, measured: float) -> None:
        self._goal(name, f"<= {limit:g}", measured, measured <= limit)

    def at_least(self, name: str, limit: float, measured: float) -> None:
        self._goal(name, f">= {limit:g}", measured, measured >= limit)

    def exactly(self, name: str, want: int, measured: int) -> None:
        self._goal(name, f"== {want}", measured, measured == want)

    def holds(self, name: str, goal: str, measured: bool) -> None:
        self._goal(name, goal, measured, measured)

    def _goal(self, name: str, goal: str, measured: float, met: bool) -> None:
        shown = measured if isinstance(measured, int) else round(measured, 5)
        self.goals[name] = {"goal": goal, "measured": shown, "met": bool(met)}

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Right-aligned columns, the first one left-aligned."""
        lines = [list(map(str, row)) for row in [head, *rows]]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        self.say(f"\n{title}")
        for number, line in enumerate(lines):
            first, *others = (
                cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            self.say("  " + "   ".join([first, *others]))
            if number == 0:
                self.say("  " + "-" * (sum(widths) + 3 * (len(widths) - 1)))

    @property
    def ok(self) -> bool:
        return bool(self.goals) and all(goal["met"] for goal in self.goals.values())

    def finish(self) -> None:
        """The goals as a table, and the JSON line."""
        rows = [[name, goal["goal"], goal["measured"], "met" if goal["met"] else "MISSED"] for name, goal in self.goals.items()]
        self.table("goals", ["goal", "wanted", "measured", ""], rows)
        self.say()
        self.say(json.dumps({"bench": self.bench, "metrics": self.metrics, "goals": self.goals, "ok": self.ok}))
