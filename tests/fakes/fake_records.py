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
    n_decoded: int = 0
    first_us: int = 0
    last_us: int = 0
    cancel: asyncio.Event = field(default_factory=asyncio.Event)
    totals: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ["n_decoded", "us_decode", "n_prompt", "n_cached", "n_launched", "t_last_token_us"], 0
        )
    )

    @property
    def us_decode(self) -> int:
        """From the first token of the task to its last; 1 at least, as the real engine has it."""
        return max(1, self.last_us - self.first_us) if self.n_decoded else 0

    def decoded(self, now_us: int) -> None:
        """One token more."""
        before = self.us_decode
        self.first_us = self.first_us if self.n_decoded else now_us
        self.n_decoded, self.last_us = self.n_decoded + 1, now_us
        self.totals["n_decoded"] += 1
        self.totals["us_decode"] += self.us_decode - before
        self.totals["t_last_token_us"] = now_us

    def row(self, n_ctx: int) -> dict[str, object]:
        """As `state` and `counters` show it."""
        return {
            "slot": self.slot,
            "state": self.state,
            "req": self.req,
            "task": self.task,
            "session": self.session,
            "fill": False,
            "seq": self.seq,
            "n_shared": self.n_shared,
            "n_tokens": len(self.tokens),
            "n_ctx": n_ctx,
            "n_decoded": self.n_decoded,
            "us_decode": self.us_decode,
            "totals": dict(self.totals),
        }

    def rest(self) -> None:
        """Its task is over."""
        self.state, self.req, self.task, self.n_decoded = "idle", 0, -1, 0

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
    id_slot: int | None = None
    n_probs: int = 0

    def miss(self, seq: Seq | None, gain: int, own: int) -> str | None:
        """Why nothing was taken from the sequence, where `own` tokens were there and `gain` to be had."""
        if self.seq is None:
            return None
        if not self.cache_prompt:
            return "cache_prompt_off"
        if seq is None:
            return "stale_seq"
        if gain and gain <= own:
            return "own_cache_longer"
        return "too_short" if not self.max_shared or len(self.tokens) < 2 else "token_mismatch"

    task: int = 0
    us_queued: int = 0
    us_prompt: int = 0


@dataclass
class Facts:
    """What came of a task's start."""

    slot: int
    n_prompt: int
    n_cached: int
    n_shared: int
    miss: str | None
    candidates: list[dict] = field(default_factory=list)


def news(now: dict, held: dict[str, list[dict]], seen: dict) -> dict | None:
    """The slots that differ from what was `seen`, which is brought up to date, and the sequences if they do; None for no news."""
    new_boot = seen["boot_id"] != now["boot_id"]
    slots = [row for row in held["slots"] if new_boot or seen.get(row["slot"]) != row]
    seqs = {"seqs": held["seqs"]} if new_boot or seen["seqs"] != held["seqs"] else {}
    if not slots and not seqs and seen["cells"] == now["cells"]:
        return None
    seen.update({row["slot"]: row for row in slots} | {"boot_id": now["boot_id"], "cells": now["cells"], "seqs": held["seqs"]})
    return {**now, "slots": slots, **seqs}


def opencoti(facts: Facts, echo: str | None, *, named: bool, n_left: int) -> dict:
    """The object that the engine adds to replies of requests with a number. Its keys win."""
    try:
        extra = json.loads(echo) if echo and len(echo) <= 4096 and echo.isascii() else {}
    except ValueError:
        extra = {}
    own = {"session_tps": None, "cached_prefix_tokens": facts.n_shared, "ctx_headroom_tokens": n_left}
    if named or "miss" not in extra:
        own["miss"] = facts.miss
    return {**(extra if isinstance(extra, dict) else {}), **own}
