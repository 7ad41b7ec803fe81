"""Conversations without a session id, known again by their prompts.

Law: pure. A prompt that begins with all of the prompt that an idle slot worked on last, in the same pool and beyond that pool, is
the next turn of that conversation. What a slot worked on is forgotten when it works on something else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from polykv_proxy.core.events import SlotEvent, SlotEventKind
from polykv_proxy.core.prefix import Tokens, common_prefix


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was asked, in which pool. `n_prefix`: tokens of it that are the pool's."""

    pool_id: int
    n_prefix: int
    tokens: Tokens

    def goes_on_in(self, other: Prompt) -> bool:
        """Is the other one the next turn of this?"""
        same = self.pool_id == other.pool_id and self.n_prefix < self.tokens.size < other.tokens.size
        return same and common_prefix(self.tokens, other.tokens) == self.tokens.size


class Unnamed:
    """The last prompt of each slot that worked for nobody in particular."""

    def __init__(self) -> None:
        self._asked: dict[int, Prompt] = {}
        self._of_slot: dict[int, Prompt] = {}

    def asked(self, req: int, prompt: Prompt) -> None:
        """A request without a session id goes to the engine with this prompt."""
        self._asked[req] = prompt

    def closed(self, req: int) -> None:
        """It is over, whatever became of it."""
        self._asked.pop(req, None)

    def saw(self, event: SlotEvent) -> None:
        """Who begins in a slot takes it over; who ends there leaves its prompt."""
        if event.kind is SlotEventKind.LAUNCHED:
            self._of_slot.pop(event.slot, None)
        elif event.kind is SlotEventKind.RELEASED and (prompt := self._asked.get(event.req)) is not None:
            self._of_slot[event.slot] = prompt

    def forget(self) -> None:
        """The engine is another."""
        self._of_slot.clear()

    def continues(self, prompt: Prompt, idle: Collection[int]) -> bool:
        """Does it go on with what one of these slots holds?"""
        return any(slot in idle and held.goes_on_in(prompt) for slot, held in self._of_slot.items())
