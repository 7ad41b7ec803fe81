"""How fast sessions run: the engine's counters and events folded into figures.

Law: pure; durations come from the engine's steady clock, so neither our delays nor steps of a clock reach a figure. What the
counters say twice counts once, and what a new boot begins anew takes nothing back. Rows that were read before the last event of
their slot are old news. `now` is ours, in seconds of a steady clock, and serves only to see that nothing comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from polykv_proxy.core.events import Counters, SlotEvent, SlotEventKind, SlotReading, SlotTotals
from polykv_proxy.core.pace import Pace, Rate
from polykv_proxy.core.turns import Turn

SAMPLE_US = 10_000
"""Shorter samples wait for more tokens: the average weighs bursts too."""
PATIENCE_S = 0.25
"""Counters come some ten times a second: only silence beyond this is the engine's."""

_BEGINS = (SlotEventKind.LAUNCHED, SlotEventKind.FIRST_TOKEN)


@dataclass(frozen=True, slots=True)
class Speed:
    """What is known of an owner: its pace, its last turn as far as that got, and the tokens per second of the last whole one."""

    pace: Pace = field(default_factory=Pace)
    turn: Turn | None = None
    last_tps: float | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """A running task. `n_timed` tokens within `us` are in the average already; `grew_at`: when we last saw it get on."""

    owner: int
    slot: int
    generating: bool = False
    n_timed: int = 0
    us: int = 0
    grew_at: float = 0.0


def owner_of(session: int, task: int) -> int:
    """Whose figures a task's are: its session's number, or `-1 - task` without one."""
    return session if session > 0 else -1 - task


class Throughput:
    """The figures of one engine over all its boots. Owners are those of `owner_of`."""

    def __init__(self) -> None:
        self.totals = SlotTotals()
        """Over all slots and boots since the first look; only grows."""
        self._boot_id: str | None = None
        self._began: SlotTotals | None = None
        self._read_us: int | None = None
        self._read_at = 0.0
        self._decoded = Rate()
        self._prompted = Rate()
        self._streams: dict[int, Stream] = {}
        self._speeds: dict[int, Speed] = {}
        self._of_slot: dict[int, SlotTotals] = {}
        self._event_us: dict[int, int] = {}
        self._last_owner: dict[int, int] = {}
        self._forgotten: set[int] = set()

    # -- what comes in ------------------------------------------------------------------------------------------------

    def boot(self, boot_id: str) -> None:
        """The engine that speaks from now on. Of its first boot only what is new counts, of later ones everything."""
        if boot_id == self._boot_id:
            return
        self._began = SlotTotals() if self._boot_id is not None else None
        self._boot_id, self._read_us = boot_id, None
        for task in list(self._streams):
            self._close(task)
        for owner in [owner for owner in self._speeds if owner < 0]:
            del self._speeds[owner]
        self._of_slot, self._event_us, self._last_owner = {}, {}, {}

    def saw(self, event: SlotEvent, turn: Turn, now: float) -> None:
        """One event, and its turn's figures by then."""
        if event.slot < 0:
            return
        self._event_us[event.slot] = max(event.t_us, self._event_us.get(event.slot, 0))
        if event.fill:
            return
        if event.kind in _BEGINS:
            self._open(event.task, event.slot, event.session, now)
        stream = self._streams.get(event.task)
        if stream is None:
            return
        if event.kind is SlotEventKind.FIRST_TOKEN:
            self._streams[event.task] = replace(stream, generating=True, grew_at=now)
            self._keep(stream.owner, turn)
        elif event.kind is SlotEventKind.RELEASED:
            self._fold(event.task, event.n_decoded, event.us_decode, now, final=True)
            self._keep(stream.owner, turn)
            self._close(event.task)

    def counted(self, counters: Counters, now: float) -> None:
        """One reading of the counters; of another boot it is none."""
        if counters.boot_id != self._boot_id:
            return
        before = self.totals
        for reading in counters.slots:
            self._add(reading)
            if counters.t_us > self._event_us.get(reading.slot, -1):
                self._follow(reading, now)
        if self._read_us is not None:
            seconds = (counters.t_us - self._read_us) / 1e6
            self._decoded = self._decoded.after(self.totals.n_decoded - before.n_decoded, seconds)
            self._prompted = self._prompted.after(self.totals.n_prompt - before.n_prompt, seconds)
        self._read_us, self._read_at = counters.t_us, now

    def forget(self, session: int) -> None:
        """A session has ended: nothing is kept of it once its tasks are over."""
        if any(stream.owner == session for stream in self._streams.values()):
            self._forgotten.add(session)
        else:
            self._speeds.pop(session, None)

    # -- what is known ------------------------------------------------------------------------------------------------

    def speed(self, owner: int) -> Speed | None:
        """What is known of a session or of a task without one."""
        return self._speeds.get(owner)

    def tps(self, owner: int, now: float) -> float | None:
        """Experienced tokens per second; between turns those of the last one, fewer and fewer while no token comes."""
        speed = self._speeds.get(owner)
        if speed is None:
            return None
        streams = [stream for stream in self._streams.values() if stream.owner == owner and stream.generating]
        waits = min((now - stream.grew_at for stream in streams), default=0.0)
        return speed.pace.waiting(max(0.0, waits - PATIENCE_S))

    def generating(self, owner: int) -> bool:
        """Is a first token out and the task not over?"""
        return any(stream.owner == owner and stream.generating for stream in self._streams.values())

    def owners(self) -> set[int]:
        """Those of the tasks that run."""
        return {stream.owner for stream in self._streams.values()}

    def slot_owner(self, slot: int) -> int | None:
        """Whose figures a slot shows: who works there, or did so last."""
        return self._last_owner.get(slot)

    def aggregate_tps(self, now: float) -> float:
        """Tokens per second that the engine generates, by its counts."""
        return self._decoded.since(now - self._read_at - PATIENCE_S)

    def prompt_tps(self, now: float) -> float:
        """Prompt tokens per second that the engine computes, by its counts."""
        return self._prompted.since(now - self._read_at - PATIENCE_S)

    # -- within -------------------------------------------------------------------------------------------------------

    def _add(self, reading: SlotReading) -> None:
        last = self._of_slot.get(reading.slot, self._began)
        self._of_slot[reading.slot] = reading.totals
        if last is not None:
            self.totals = _sum(self.totals, _growth(last, reading.totals))

    def _follow(self, reading: SlotReading, now: float) -> None:
        for task, stream in list(self._streams.items()):
            if stream.slot == reading.slot and task != reading.task:
                self._close(task)
        if reading.task < 0 or reading.fill:
            return
        self._open(reading.task, reading.slot, reading.session, now)
        if reading.n_decoded > 0:
            self._fold(reading.task, reading.n_decoded, reading.us_decode, now, final=False)

    def _open(self, task: int, slot: int, session: int, now: float) -> None:
        if task not in self._streams:
            owner, before = owner_of(session, task), self._last_owner.get(slot)
            self._streams[task] = Stream(owner, slot, grew_at=now)
            self._speeds.setdefault(owner, Speed())
            self._last_owner[slot] = owner
            self._drop(before, slot)

    def _fold(self, task: int, n_decoded: int, us: int, now: float, *, final: bool) -> None:
        """The first token of a turn is free: its time is the prompt's."""
        stream = self._streams[task]
        n_new, us_new = n_decoded - 1 - stream.n_timed, us - stream.us
        if n_new > 0:
            stream = replace(stream, grew_at=now)
        if n_new > 0 and us_new > 0 and (final or us_new >= SAMPLE_US):
            speed = self._speeds[stream.owner]
            self._speeds[stream.owner] = replace(speed, pace=speed.pace.after(n_new, us_new / 1e6))
            stream = replace(stream, n_timed=n_decoded - 1, us=us)
        self._streams[task] = replace(stream, generating=True)

    def _keep(self, owner: int, turn: Turn) -> None:
        speed = self._speeds[owner]
        self._speeds[owner] = replace(speed, turn=turn, last_tps=speed.last_tps if turn.tps is None else turn.tps)

    def _close(self, task: int) -> None:
        stream = self._streams.pop(task)
        self._drop(stream.owner, stream.slot)

    def _drop(self, owner: int | None, slot: int) -> None:
        """Figures go with the last task of an ended session; those of no session stay until their slot has another owner."""
        if owner is None or any(stream.owner == owner for stream in self._streams.values()):
            return
        if owner in self._forgotten or (owner < 0 and self._last_owner.get(slot) != owner):
            self._forgotten.discard(owner)
            self._speeds.pop(owner, None)


def _growth(last: SlotTotals, now: SlotTotals) -> SlotTotals:
    """What was added since; counts that fell begin anew and have added nothing that is known."""
    return SlotTotals(
        max(0, now.n_decoded - last.n_decoded), max(0, now.n_prompt - last.n_prompt), max(0, now.n_cached - last.n_cached)
    )


def _sum(left: SlotTotals, right: SlotTotals) -> SlotTotals:
    return SlotTotals(left.n_decoded + right.n_decoded, left.n_prompt + right.n_prompt, left.n_cached + right.n_cached)


def mean(values: Iterable[float]) -> float | None:
    """The mean; None of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else None
