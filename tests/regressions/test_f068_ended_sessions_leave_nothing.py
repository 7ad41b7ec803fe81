"""F068: memory rose without end with each session, or with names that callers sent."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

from polykv_proxy.core.attach import Wish
from polykv_proxy.core.events import Counters, SlotEvent, SlotEventKind, SlotReading
from polykv_proxy.runtime.news import RING
from tests.integration.rig import Rig, rig

N_SESSIONS = 5000
N_SLOTS = 4
LIFE = (SlotEventKind.LAUNCHED, SlotEventKind.FIRST_TOKEN, SlotEventKind.FINISHED, SlotEventKind.RELEASED)


def _live(proxy: Rig, n: int, session_id: str | None) -> None:
    """One request, all through the listener and the ledger, as the link does it, and a reading that comes late."""
    hub, now = proxy.runtime.hub, proxy.clock.wall()
    req = hub.ledger.take_req()
    _, session = hub.ledger.admit(req, Wish(session_id=session_id), now)
    number = session.number if session else 0
    for kind in LIFE:
        counts = {"t_us": n, "n_prompt": 9, "n_decoded": 5, "us_prompt": 9, "us_decode": 10**6}
        event = SlotEvent(kind, req, 0, number, None, task=n, slot=n % N_SLOTS, **counts)  # type: ignore[arg-type]
        hub.telemetry.saw(event)
        hub.ledger.engine_event(event, now)
    late = SlotReading(n % N_SLOTS, n, req, number, n_decoded=5, us_decode=10**6)
    hub.telemetry.throughput.counted(Counters(hub.boot_id, n, (late,)), now)


async def test_five_thousand_sessions_leave_what_one_leaves(tmp_path: Path) -> None:
    """Random names, closed again, half of the requests without one: figures, views and events are as few as before."""
    dice = random.Random(68)
    async with rig(tmp_path) as proxy:
        hub = proxy.runtime.hub
        for n in range(N_SESSIONS):
            session_id = "".join(dice.choices(string.ascii_letters, k=20)) if n % 2 else None
            _live(proxy, n, session_id)
            if session_id is not None:
                hub.ledger.end_session(session_id, proxy.clock.wall())
        throughput = hub.telemetry.throughput
        assert throughput._streams == {}
        assert throughput._forgotten == set()
        assert len(throughput._speeds) <= N_SLOTS
        assert len(throughput._last_owner) <= N_SLOTS
        assert len(hub.telemetry.news._ring) <= RING
        assert hub.telemetry.savings._of_pool == {}
        proxy.clock.now += 1
        shown = (await proxy.api.get("/polykv/tps?once=1")).json()
        assert shown["sessions"] == []
        assert len(json.dumps(shown)) < 1000
