"""Who waits for a slot of the fake engine, and who gets which.

Law: first come, first served; but a slot that was asked for by its number goes to who asked, before all others.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from tests.fakes.fake_records import Ask, Slot


def common(left: list[int], right: list[int]) -> int:
    """Longest common prefix, the slow and plain way."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


class Line:
    """Those who wait for one of these slots."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._promised: Counter[int] = Counter()
        self._waiting: list[tuple[Ask, asyncio.Future[Slot]]] = []

    async def slot_for(self, ask: Ask) -> Slot:
        """The slot of a task, once its turn has come; it is the caller's from then on."""
        turn: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, turn))
        if ask.id_slot is not None:
            self._promised[ask.id_slot] += 1
        try:
            self.serve()
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                turn.result().state = "idle"
            raise
        finally:
            if ask.id_slot is not None:
                self._promised[ask.id_slot] -= 1
            self._waiting = [waiting for waiting in self._waiting if waiting[1] is not turn]
            self.serve()

    def serve(self) -> None:
        """Give what is idle to those who wait, in their order."""
        for ask, turn in self._waiting:
            if not any(slot.state == "idle" for slot in self._slots):
                return
            if not turn.done() and (slot := self._choose(ask)) is not None:
                slot.state = "prefill"
                turn.set_result(slot)

    def _choose(self, ask: Ask) -> Slot | None:
        promised = {slot for slot, n in self._promised.items() if n}
        idle = [slot for slot in self._slots if slot.state == "idle" and (slot.slot not in promised or slot.slot == ask.id_slot)]
        if ask.id_slot is not None:
            return next((slot for slot in idle if slot.slot == ask.id_slot), None)
        if not idle:
            return None
        mine = [slot for slot in idle if ask.session and slot.session == ask.session]
        if mine:
            return mine[0]
        plain = [slot for slot in idle if not slot.session and not slot.n_shared]
        return max(plain or idle, key=lambda slot: (common(slot.tokens, ask.tokens), -slot.used_at))
