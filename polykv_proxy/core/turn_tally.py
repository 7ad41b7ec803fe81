"""What has become of the tasks of the engine, counted.

Law: only grows. Every label is a word of a fixed set, whatever the engine sends.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TypeVar

from polykv_proxy.core.books import Book, Brought
from polykv_proxy.core.events import SlotEvent, SlotEventKind
from polykv_proxy.core.histogram import Histogram
from polykv_proxy.core.tally import SHORT_S
from polykv_proxy.core.turns import Turn

Word = TypeVar("Word", bound=StrEnum)

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
NEXT_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Bounds of vLLM's histograms of the same name, so that panels made for those fit."""


class Reason(StrEnum):
    """How a task of the engine ended."""

    STOP = "stop"
    LIMIT = "limit"
    TRUNCATED = "truncated"
    CANCELLED = "cancelled"
    ERROR = "error"
    DROPPED = "dropped"
    """It never got a slot."""
    OTHER = "other"


class NotShared(StrEnum):
    """Why a task took nothing from a pool: the engine's words (docs/engine-protocol.md), and ours."""

    STALE_SEQ = "stale_seq"
    TOKEN_MISMATCH = "token_mismatch"  # noqa: S105 - the engine's word
    TOO_SHORT = "too_short"
    MEMORY_CLASS = "memory_class"
    LORA = "lora"
    CACHE_PROMPT_OFF = "cache_prompt_off"
    MEDIA = "media"
    OWN_CACHE_LONGER = "own_cache_longer"
    REBUILD_FAILED = "rebuild_failed"
    NO_SEQ_IDS = "no_seq_ids"
    REBUILT = "rebuilt"
    """Its pool had no KV and was made again for it."""
    NO_POOL = "no_pool"
    """It named none."""
    OTHER = "other"


class TurnTally:
    """Tasks that generate, once they are over. `n_prompt`: tokens of prompts, computed or cached; `saved_s` is an estimate."""

    def __init__(self) -> None:
        self.ended: Counter[Reason] = Counter()
        self.not_shared: Counter[NotShared] = Counter()
        self.queue_s = Histogram((*SHORT_S, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0))
        self.ttft_s = Histogram(FIRST_TOKEN_S)
        self.tpot_s = Histogram(NEXT_TOKEN_S)
        self.gaps_s = Histogram(NEXT_TOKEN_S)
        """Between tokens: each turn's mean, as many times as it had gaps."""
        self.n_prompt = 0
        self.n_cached = 0
        self.n_shared = 0
        self.saved_s = 0.0

    def dropped(self) -> None:
        """A task that never got a slot."""
        self.ended[Reason.DROPPED] += 1

    def released(self, event: SlotEvent, turn: Turn, book: Book | None, saved_s: float = 0.0) -> None:
        """A task is over. `book` is that of its request, None for requests that named nothing. Prompts count once computed.

        `saved_s`: about how long what it shared would have taken (savings.py).
        """
        assert event.kind is SlotEventKind.RELEASED
        self.ended[_word(Reason, event.reason)] += 1
        self.queue_s.add(turn.queue_s)
        self.ttft_s.add(turn.ttft_s)
        self.tpot_s.add(turn.tpot_s)
        self.gaps_s.add(turn.tpot_s, turn.n_decoded - 1)
        if turn.ttft_s is None:
            return
        self.n_prompt += turn.n_prompt
        self.n_cached += turn.n_cached
        why = why_not_shared(event, book)
        if why is None:
            self.n_shared += event.n_shared
            self.saved_s += saved_s
        else:
            self.not_shared[why] += 1


def why_not_shared(event: SlotEvent, book: Book | None) -> NotShared | None:
    """Why a task saved nothing by a pool; None when it did.

    1. the pool was made again for it. 2. shared: none. 3. named no pool. 4. what the proxy knew. 5. what the engine said.
    """
    if book is not None and book.brought is Brought.REBUILT:
        return NotShared.REBUILT
    if event.n_shared > 0:
        return None
    if event.req == 0 or (book is not None and book.pool_id is None and book.miss is None):
        return NotShared.NO_POOL
    return _word(NotShared, book.miss if book is not None and book.miss is not None else event.miss)


def _word(words: type[Word], text: str | None) -> Word:
    return next((word for word in words if word == text), words("other"))
