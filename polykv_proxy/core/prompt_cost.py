"""What computing one token of a prompt costs, from what prompts took while others ran.

Law: pure. Every measure is an upper bound: what else ran in that time made it longer, never shorter. So the least of them is the
nearest to the truth, and load does not raise it.
"""

from __future__ import annotations

from polykv_proxy.core.events import SlotEvent, SlotEventKind

MEASURABLE = 16
"""Fewer tokens tell of the fixed cost of a step."""


class PromptCost:
    """One engine's cost. Two measures: a prompt by itself, and all prompts that were computed at the same time together.

    A prompt's own time has its waits for others' prompts in it. Those are computed within the same stretch of time, from when
    the first of them was launched: that time by all their tokens has no such wait in it.
    """

    def __init__(self) -> None:
        self.s_per_token: float | None = None
        """Seconds; None before the first measure."""
        self._boot_id: str | None = None
        self._old = False
        self._open: set[int] = set()
        self._began_us = 0
        self._n_tokens = 0

    def boot(self, boot_id: str) -> None:
        """The engine that speaks from now on. What was measured of another holds until there is something new."""
        self._old = self._old or boot_id != self._boot_id
        self._boot_id = boot_id
        self.missed()

    def missed(self) -> None:
        """Events were missed: whose prompt is being computed is not known."""
        self._open.clear()

    def saw(self, event: SlotEvent) -> None:
        """One event of a task."""
        if event.kind is SlotEventKind.LAUNCHED:
            if not self._open:
                self._began_us, self._n_tokens = event.t_us, 0
            self._open.add(event.task)
        elif event.us_prompt > 0:
            self._computed(event)
        elif event.kind is SlotEventKind.RELEASED:
            self._open.discard(event.task)

    def _computed(self, event: SlotEvent) -> None:
        n_tokens = max(0, event.n_prompt - event.n_cached)
        self._measure(n_tokens, event.us_prompt)
        if event.task in self._open:
            self._open.remove(event.task)
            self._n_tokens += n_tokens if event.index == 0 else 0  # variants of a prompt say its tokens again
            self._measure(self._n_tokens, event.t_us - event.us_decode - self._began_us)

    def _measure(self, n_tokens: int, us: int) -> None:
        if n_tokens < MEASURABLE or us <= 0:
            return
        found = us / 1e6 / n_tokens
        if self.s_per_token is None or self._old or found < self.s_per_token:
            self.s_per_token, self._old = found, False
