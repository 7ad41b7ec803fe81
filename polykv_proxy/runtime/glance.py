"""The view for those who look often: one look serves all of them.

Law: asks the engine nothing. However many look, there are at most ten looks a second.
"""

from __future__ import annotations

from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.rows import StateView
from polykv_proxy.runtime.view import View

TICK_S = 0.1


class Glance:
    """The last view of one runtime."""

    def __init__(self, hub: Hub, view: View) -> None:
        self._hub = hub
        self._view = view
        self._last: tuple[float, StateView] | None = None

    def now(self) -> StateView:
        """Everything, by what was heard of the engine; no older than a tick."""
        tick = self._hub.clock.monotonic() // TICK_S
        if self._last is None or self._last[0] != tick:
            self._last = (tick, self._view.look(self._hub.hello, self._hub.telemetry.live.state))
        return self._last[1]
