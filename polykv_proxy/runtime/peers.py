"""Who shares the engine's device: its registry, read whenever somebody looks, and the news of who came and went.

Law: asks the engine nothing, so peers are seen also while ours is being restarted. Ours is the process to which the engine's slot
belonged when it was greeted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from polykv_proxy.engine.wire import GpuShare
from polykv_proxy.gpu_share.clock_watch import ClockWatch
from polykv_proxy.gpu_share.layout import Entry
from polykv_proxy.gpu_share.reader import SegmentError, read_registry
from polykv_proxy.gpu_share.schedule import shares
from polykv_proxy.ports import Clock
from polykv_proxy.runtime.news import News, Topic
from polykv_proxy.runtime.rows import GpuRow, PeerRow

UNKNOWN = "the engine has not said whether it shares a device"


class Peers:
    """Looks at one registry. `read` gives the claimed slots of a key."""

    def __init__(self, news: News, clock: Clock, read: Callable[[str], Sequence[Entry]] = read_registry) -> None:
        self._news = news
        self._clock = clock
        self._read = read
        self._watch = ClockWatch()
        self._key: str | None = None
        self._why = UNKNOWN
        self._slot: int | None = None
        self._me: tuple[int, int] | None = None
        self._known: Mapping[tuple[int, int], PeerRow] | None = None

    def expect(self, key: str | None) -> None:
        """The key that the engine is started with, where it is known: peers are seen before it has said anything."""
        self._key = key

    def engine_says(self, share: GpuShare) -> None:
        """It was greeted."""
        if share.gpu_key != self._key:
            self._known = None
        self._key, self._why, self._me = share.gpu_key, share.why or UNKNOWN, None
        self._slot = share.slot if share.gpu_key is not None else None
        self._entries()

    def look(self) -> GpuRow:
        """Everybody alive, ours apart; a peer that is idle among active ones has no share."""
        entries, why = self._entries()
        rows = self._rows(entries)
        mine = next((row for entry, row in rows if _identity(entry) == self._me), None)
        others = tuple(row for entry, row in rows if _identity(entry) != self._me)
        return GpuRow(enabled=self._key is not None and why is None, gpu_key=self._key, why=why, me=mine, peers=others)

    def sweep(self) -> None:
        """Tell who has come, who has gone, and whose weight is another."""
        if self._key is None:
            return
        entries, why = self._entries()
        if why is not None:
            return
        now = {_identity(entry): row for entry, row in self._rows(entries)}
        known = self._known
        self._known = now
        if known is None:
            return
        for identity, row in now.items():
            before = known.get(identity)
            if before is None:
                self._tell("joined", row, identity)
            elif before.weight != row.weight:
                self._tell("weight", row, identity)
        for identity, row in known.items():
            if identity not in now:
                self._tell("left", row, identity)

    def _tell(self, kind: str, row: PeerRow, identity: tuple[int, int]) -> None:
        facts = {"pid": row.pid, "name": row.name, "slot": row.slot, "weight": row.weight}
        self._news.publish(Topic.PEER, kind, ours=identity == self._me, gpu_key=self._key, **facts)

    def _entries(self) -> tuple[Sequence[Entry], str | None]:
        if self._key is None:
            return (), self._why
        try:
            entries = self._read(self._key)
        except SegmentError as error:
            return (), str(error)
        if self._slot is not None:
            self._me, self._slot = next((_identity(entry) for entry in entries if entry.slot == self._slot), None), None
        return entries, None

    def _rows(self, entries: Sequence[Entry]) -> list[tuple[Entry, PeerRow]]:
        now = int(self._clock.wall() * 1e6)
        step = self._watch.look(now, int(self._clock.monotonic() * 1e6))
        alive = [entry for entry in entries if entry.alive(now, step)]
        sharing = [entry for entry in alive if entry.active] or alive
        parts = dict(zip((entry.slot for entry in sharing), shares([entry.weight for entry in sharing]), strict=True))
        return [(entry, _row(entry, float(parts.get(entry.slot, 0)), now)) for entry in alive]


def _identity(entry: Entry) -> tuple[int, int]:
    return entry.pid, entry.boot_us


def _row(entry: Entry, share: float, now_us: int) -> PeerRow:
    return PeerRow(
        pid=entry.pid,
        name=entry.name,
        slot=entry.slot,
        weight=round(entry.weight, 6),
        share_pct=round(100 * share, 3),
        busy_pct=round(entry.busy_ppm / 1e4, 3),
        active=entry.active,
        heartbeat_age_ms=max(0, (now_us - entry.heartbeat_us) // 1000),
    )
