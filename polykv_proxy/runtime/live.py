"""The engine's state as it was last heard of: read once a connection, kept up to date by its counters.

Law: asks nobody and waits for nothing, so it may be a tenth of a second old; who must see what a verb has done asks the engine.
"""

from __future__ import annotations

from polykv_proxy.engine.wire import Counters, State


class Live:
    """`state` is None while the engine is not followed."""

    def __init__(self) -> None:
        self.state: State | None = None

    def saw(self, state: State) -> None:
        """The whole state, read from the engine."""
        self.state = state

    def counted(self, counters: Counters) -> None:
        """What changed since; news of another boot wait until its state has been read."""
        state = self.state
        if state is None or state.boot_id != counters.boot_id:
            return
        slots = {slot.slot: slot for slot in state.slots if counters.phase == "ready"}
        slots.update({slot.slot: slot for slot in counters.slots})
        self.state = state.model_copy(
            update={
                "update": counters.update,
                "phase": counters.phase,
                "t_us": counters.t_us,
                "slots": [slots[number] for number in sorted(slots)],
                "seqs": state.seqs if counters.seqs is None else counters.seqs,
                "cells": counters.cells,
                "kv_bytes": counters.kv_bytes,
            }
        )

    def lost(self) -> None:
        """Nobody answers."""
        self.state = None
