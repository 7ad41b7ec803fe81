"""Those who wait: a line for each pool, first come first served, and turns between the lines.

Law: a line is bounded, everybody in it has a deadline, and no line is passed over while others move.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polykv_proxy.core.admission.verdict import Finding


@dataclass(frozen=True, slots=True)
class Ask:
    """One request that wants to start. `n_prompt`: its private tokens, those of the pool's prefix not among them.

    `max_tokens` None: the caller set no limit. `n_tasks`: what the engine makes of it, each with a
    slot of its own while it runs. `session` None: it named none, and is one of its own while it runs. `unruled`: no
    policy has a say, it only counts for the bound of the whole server. `continues`: it is the next turn of a conversation without
    a session id. `request_id`: the caller's name for it.
    """

    req: int
    pool_id: int | None = None
    session: str | None = None
    n_prefix: int = 0
    n_prompt: int = 0
    max_tokens: int | None = None
    n_tasks: int = 1
    overcommit: bool = False
    unruled: bool = False
    continues: bool = False
    request_id: str | None = None


@dataclass(slots=True)
class Waiting:
    """One who waits since `since`, for what `finding` says. `settling_since`: since when nothing but settling is in the way."""

    ask: Ask
    line: int
    since: float
    deadline: float
    finding: Finding
    settling_since: float | None = None


class Lines:
    """All lines, by number."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[int, Waiting]] = {}
        self._line_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._line_of)

    def __iter__(self) -> Iterator[Waiting]:
        return (waiting for line in list(self._lines.values()) for waiting in list(line.values()))

    def length(self, line: int) -> int:
        """How many wait there."""
        return len(self._lines.get(line, ()))

    def join(self, waiting: Waiting) -> None:
        """At the end of its line."""
        self._lines.setdefault(waiting.line, {})[waiting.ask.req] = waiting
        self._line_of[waiting.ask.req] = waiting.line

    def leave(self, req: int) -> Waiting | None:
        """Out of the line; None for somebody who does not wait."""
        number = self._line_of.pop(req, None)
        if number is None:
            return None
        line = self._lines[number]
        waiting = line.pop(req)
        if not line:
            del self._lines[number]
        return waiting

    def position(self, req: int) -> int | None:
        """From 1; None for somebody who does not wait."""
        number = self._line_of.get(req)
        return None if number is None else list(self._lines[number]).index(req) + 1

    def positions(self) -> dict[int, int]:
        """Of all who wait, by request number."""
        return {req: place for line in self._lines.values() for place, req in enumerate(line, 1)}

    def heads(self) -> list[Waiting]:
        """The first of each line, in the order of their turns."""
        return [next(iter(line.values())) for line in self._lines.values()]

    def served(self, line: int) -> None:
        """Somebody of this line was let in: it is the others' turn."""
        if line in self._lines:
            self._lines[line] = self._lines.pop(line)
