"""What pickers and routers of model servers ask of a backend, from whatever this engine tells.

Law: pure. Of an engine with our protocol by its state and events, of any other by its metrics page; what neither says is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polykv_proxy.core.pools import Residency
from polykv_proxy.core.retention import Keep
from polykv_proxy.engine.wire import Hello, SlotState, State
from polykv_proxy.observability.engine_page import EnginePage
from polykv_proxy.runtime.rows import PoolRow, StateView

_MAY_GO = frozenset({None, Keep.CHILDREN.value})


@dataclass(frozen=True, slots=True)
class Tokens:
    """Counts that only grow: of prompts, of those the cached, and generated."""

    n_prompt: int
    n_cached: int
    n_generated: int


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """`usage`: the part of the KV cache that is in use and cannot be evicted, 0 to 1."""

    n_running: int
    n_waiting: int
    tokens: Tokens | None = None
    usage: float | None = None
    n_cells: int | None = None


def by_protocol(view: StateView, hello: Hello | None, state: State | None, tokens: Tokens, n_in_flight: int) -> ServerFacts:
    """Of an engine that speaks our protocol. `n_in_flight`: requests on generating routes."""
    if hello is None or state is None:
        return ServerFacts(0, n_in_flight, tokens)
    slots = [slot for slot in state.slots if slot.state != "idle" and not slot.fill]
    waiting = max(0, n_in_flight - _n_requests(slots))
    return ServerFacts(len(slots), waiting, tokens, usage(view, hello, state), hello.kv.cells or hello.n_ctx)


def by_page(page: EnginePage | None, n_in_flight: int) -> ServerFacts:
    """Of any engine with llama.cpp's metrics page; without one only that requests are in flight is known."""
    if page is None:
        return ServerFacts(n_in_flight, 0)
    running, waiting, computed, cached, generated = (int(page.value(f"llamacpp:{name}") or 0) for name in _COUNTS)
    return ServerFacts(running, waiting, Tokens(computed + cached, cached, generated))


_COUNTS = (
    "requests_processing",
    "requests_deferred",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "tokens_predicted_total",
)


def _n_requests(slots: Sequence[SlotState]) -> int:
    """Tasks of one request count once; one without a number is its own."""
    numbered = {slot.req for slot in slots if slot.req}
    return len(numbered) + sum(not slot.req for slot in slots)


def usage(view: StateView, hello: Hello, state: State) -> float:
    """Cells in use less those that idle slots and pools would give up. A model without cells has one state for each slot."""
    if not state.cells.total:
        return sum(slot.state != "idle" for slot in state.slots) / max(1, len(state.slots))
    idle = sum(max(0, slot.n_tokens - slot.n_shared) for slot in state.slots if slot.state == "idle")
    evictable = sum(row.own_kv_bytes for row in _evictable(view.pools)) / (hello.kv.bytes_per_token or 1)
    return min(1.0, max(0.0, (state.cells.used - idle - evictable) / state.cells.total))


def _evictable(pools: Sequence[PoolRow]) -> list[PoolRow]:
    """Resident pools that nothing keeps but children that may go too; children come after their parents."""
    stays: set[int | None] = set()
    found = []
    for row in reversed(pools):
        if row.residency == Residency.RESIDENT and row.kept_by in _MAY_GO and row.pool_id not in stays:
            found.append(row)
        elif row.kept_by is not None or row.pool_id in stays:
            stays.add(row.parent)
    return found
