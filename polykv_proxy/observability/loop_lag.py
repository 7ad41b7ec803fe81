"""How late the event loop runs what is due: the delay that everything in the proxy shares.

Law: measures and does nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from polykv_proxy.core.histogram import Histogram
from polykv_proxy.core.tally import SHORT_S

CADENCE_S = 0.1


class LoopLag:
    """`seconds` counts the delays of a timer."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = Histogram(SHORT_S)
        self._now = now

    async def run(self) -> None:
        """Measure for ever."""
        while True:
            due = self._now() + CADENCE_S
            await asyncio.sleep(CADENCE_S)
            self.seconds.add(max(0.0, self._now() - due))
