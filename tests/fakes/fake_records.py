"""What the fake engine keeps and says: sequences, slots, tasks, facts, faults.

Law: plain records; what happens to them is FakeEngine's business.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field


@dataclass
class EngineFaultError(Exception):
    """An error answer of the engine."""

    status: int
    type: str
    message: str
    param: str | None = None


@dataclass
class Seq:
    """A sequence above the slots."""

    ref: str
    tokens: list[int]
    cells: list[int]


@dataclass
class Slot:
    """One slot."""

    slot: int
    state: str = "idle"
    req: int = 0
    task: int = -1
    session: int = 0
    seq: str | None = None
    n_shared: int = 0
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    used_at: int = 0
    cancel: asyncio.Event = field(default_factory=asyncio.Event)
    totals: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ["n_decoded", "us_decode", "n_prompt", "n_cached", "n_launched", "t_last_token_us"], 0
        )
    )

    def clear(self) -> None:
        self.session, self.seq, self.n_shared, self.tokens, self.cells = 0, None, 0, [], []


@dataclass
class Ask:
    """One task of one request."""

    tokens: list[int]
    n_predict: int
    index: int = 0
    req: int = 0
    session: int = 0
    seq: str | None = None
    max_shared: int = 0
    cache_prompt: bool = True


@dataclass
class Facts:
    """What came of a task's start."""

    slot: int
    n_prompt: int
    n_cached: int
    n_shared: int
    miss: str | None


def opencoti(facts: Facts, echo: str | None, *, named: bool) -> dict:
    """The object that the engine adds to replies of requests with a number. Its keys win."""
    try:
        extra = json.loads(echo) if echo and len(echo) <= 4096 and echo.isascii() else {}
    except ValueError:
        extra = {}
    own = {"session_tps": None, "cached_prefix_tokens": facts.n_shared}
    if named or "miss" not in extra:
        own["miss"] = facts.miss
    return {**(extra if isinstance(extra, dict) else {}), **own}
