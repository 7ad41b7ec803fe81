"""What `/slots` and `/props` say besides what the engine says: pool, session, speed and room of each slot; our settings; peers.

Law: additive only, and only where the engine has pools. By what was heard of it: nobody is asked. A page that is not of the known
form stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polykv_proxy.api.pages import peers_page
from polykv_proxy.api.splice import into_each, into_object
from polykv_proxy.api.wire import LEASE_S
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE
from polykv_proxy.core.pace import WINDOW_S, WINDOW_TOKENS
from polykv_proxy.core.pools import Pool
from polykv_proxy.core.sessions import Session
from polykv_proxy.engine.wire import SlotState
from polykv_proxy.runtime.runtime import Runtime


class Additions:
    """The additions of one proxy: a relay asks for each page whether there are some. `default_pool`: as configured."""

    def __init__(self, runtime: Runtime, api_prefix: bytes = b"", default_pool: str | None = None) -> None:
        self._runtime = runtime
        self._default_pool = default_pool
        self._pages: Mapping[bytes, Callable[[bytes], bytes | None]] = {
            api_prefix + b"/slots": self._slots,
            api_prefix + b"/props": self._props,
        }

    def __call__(self, path: bytes) -> Callable[[bytes], bytes | None] | None:
        """What makes of the engine's page ours, for a decoded path; it gives None where nothing can be added."""
        return self._pages.get(path) if self._runtime.offers_pools else None

    def _slots(self, raw: bytes) -> bytes | None:
        state = self._runtime.hub.telemetry.live.state
        slots = {slot.slot: slot for slot in state.slots} if state is not None else {}
        return into_each(raw, lambda page: self._slot(slots.get(page.get("id", -1))))

    def _slot(self, slot: SlotState | None) -> Mapping[str, object]:
        session = self._session(slot) if slot is not None else None
        pool = self._pool(slot, session) if slot is not None else None
        total = slot.n_ctx if slot is not None else 0
        return {
            "pool_id": pool.pool_id if pool is not None else None,
            "session_id": session.session_id if session is not None else None,
            "tps_ewma": self._tps(slot.slot) if slot is not None else None,
            "ctx_used": slot.n_tokens if slot is not None else None,
            "ctx_total": total or None,
            "ctx_headroom_tokens": max(0, total - slot.n_tokens) if slot is not None and total else None,
        }

    def _session(self, slot: SlotState) -> Session | None:
        """Whose tokens it holds; of a further variant of a request, whose request that is."""
        ledger = self._runtime.hub.ledger
        book = ledger.books.get(slot.req)
        return ledger.sessions.by_number(slot.session or (book.session if book else None) or 0)

    def _pool(self, slot: SlotState, session: Session | None) -> Pool | None:
        """1. That of the request that runs there; 2. of the session; 3. the one whose cells it holds."""
        ledger = self._runtime.hub.ledger
        book = ledger.books.get(slot.req)
        named = (book.pool_id if book else None) or (session.pool_id if session else None)
        if named is not None:
            return ledger.tree.get(named)
        return next((pool for pool in ledger.tree if slot.seq is not None and str(pool.seq) == slot.seq), None)

    def _tps(self, slot: int) -> float | None:
        throughput = self._runtime.hub.telemetry.throughput
        owner = throughput.slot_owner(slot)
        tps = throughput.tps(owner, self._runtime.hub.clock.monotonic()) if owner is not None else None
        return None if tps is None else round(tps, 3)

    def _props(self, raw: bytes) -> bytes | None:
        gpu_share = peers_page(self._runtime.hub.telemetry.peers.look())
        return into_object(raw, {"opencoti": {"polykv": self._config(), "gpu_share": gpu_share}})

    def _admission(self) -> Mapping[str, object]:
        """The default policy, and how many pools have one of their own."""
        policies = self._runtime.admission.gate.outlook.policies
        default = policies.own(DEFAULT_SCOPE)
        shown = default.as_object() if default is not None else {}
        names = ("mode", "on_saturation", "target_tps_per_session")
        limits = self._runtime.admission.gate.limits
        return {
            **{name: shown.get(name) for name in names},
            "n_policies": len(policies) - (default is not None),
            "max_running": limits.max_running,
            "max_queued": limits.max_queued,
        }

    def _config(self) -> Mapping[str, Any]:
        hub = self._runtime.hub
        hello, limits = hub.hello, hub.ledger.limits
        return {
            "prefix_sharing": hello.prefix_sharing if hello is not None else None,
            "max_pools": hello.max_pools if hello is not None else None,
            "max_pool_objects": limits.max_pool_objects,
            "default_pool": self._default_pool,
            "session_ttl_s": limits.session_ttl_s,
            "pool_grace_s": limits.pool_grace_s,
            "pin_lease_s": LEASE_S,
            "tps_window_s": WINDOW_S,
            "tps_window_tokens": WINDOW_TOKENS,
            "admission": self._admission(),
        }
