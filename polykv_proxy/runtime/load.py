"""The engine's figures as admission takes them: from the live state and the speeds, without asking anybody.

Law: reads only. Slots that generate nothing for anybody are taken, and are nobody's session. A slot whose request has ended since
the state was heard is idle: events come at once, counters ten times a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from polykv_proxy.core.admission.load import Load, Run
from polykv_proxy.core.throughput import mean, owner_of
from polykv_proxy.engine.wire import Hello, SlotState, State
from polykv_proxy.runtime.hub import Hub


def load_of(hub: Hub, state: State | None) -> Load | None:
    """The load as of that state; None while the engine is not followed."""
    hello = hub.hello
    if state is None or hello is None:
        return None
    running = hub.telemetry.throughput.owners()
    busy = [slot for slot in state.slots if slot.state != "idle" and (slot.ours or _owner(slot) in running)]
    taken = {slot.slot for slot in busy}
    working = [slot for slot in busy if not slot.ours]
    speeds = _speeds(hub, working)
    known = [speed for speed in speeds.values() if speed is not None]
    return Load(
        mean_active_tps=mean(known),
        n_active=len(known),
        n_warming=len(speeds) - len(known),
        slots_total=len(state.slots),
        slots_busy=len(busy),
        cells_total=state.cells.total,
        cells_free=max(0, state.cells.total - state.cells.used),
        cells_idle=sum(slot.own_cells for slot in state.slots if slot.slot not in taken),
        n_ctx_slot=hello.n_ctx_slot,
        seq_ids_used=len(state.seqs),
        seq_ids_max=hello.max_pools,
        runs=_runs(working),
        **_streams(hello, state),
    )


def _speeds(hub: Hub, slots: Iterable[SlotState]) -> dict[int, float | None]:
    """Of each owner of a working slot: its tokens per second once it decodes and has a figure."""
    throughput, now = hub.telemetry.throughput, hub.clock.monotonic()
    owners = {_owner(slot) for slot in slots}
    return {owner: throughput.tps(owner, now) if throughput.generating(owner) else None for owner in owners}


def _owner(slot: SlotState) -> int:
    return owner_of(slot.session, slot.task)


def _runs(slots: Iterable[SlotState]) -> Mapping[int, Run]:
    runs: dict[int, Run] = {}
    for slot in slots:
        if slot.req:
            before = runs.get(slot.req, Run(n_slots=0))
            runs[slot.req] = Run(max(before.n_decoded, slot.n_decoded), before.n_slots + 1)
    return runs


def _streams(hello: Hello, state: State) -> dict[str, int]:
    """Of a split cache. Idle slots have streams of their own, so only slots limit newcomers."""
    if hello.kv.unified:
        return {}
    n_slots = len(state.slots)
    free = sum(slot.state == "idle" for slot in state.slots)
    return {"streams_total": n_slots, "streams_free": free, "cells_per_stream": hello.kv.cells // max(1, hello.kv.streams)}
