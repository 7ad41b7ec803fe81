"""Mirrors runtime/peers.py."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from polykv_proxy.engine.wire import GpuShare
from polykv_proxy.gpu_share.layout import Entry
from polykv_proxy.gpu_share.reader import SegmentError
from polykv_proxy.runtime.news import News, Topic
from polykv_proxy.runtime.peers import UNKNOWN, Peers
from tests.integration.rig import ManualClock

MINE = GpuShare(enabled=True, gpu_key="k", slot=1)


@dataclass
class Room:
    """A registry by hand."""

    clock: ManualClock = field(default_factory=ManualClock)
    entries: dict[str, list[Entry]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.news = News(self.clock)
        self.peers = Peers(self.news, self.clock, self.read)

    def read(self, key: str) -> list[Entry]:
        if key not in self.entries:
            raise SegmentError(f"{key}: there is none")
        return self.entries[key]

    def entry(self, slot: int, weight: float = 1.0, *, active: bool = True, age_s: float = 0.1, pid: int = 0) -> Entry:
        heartbeat = int((self.clock.wall() - age_s) * 1e6)
        return Entry(slot, pid or 100 + slot, 9, 55, weight, active, heartbeat, 250_000, f"model-{slot}")

    def told(self) -> list[tuple[str, object, object]]:
        events = self.news.after(0) or []
        assert {event.topic for event in events} <= {Topic.PEER}
        return [(event.type, event.facts["slot"], event.facts["ours"]) for event in events]


@pytest.fixture
def room() -> Room:
    room = Room()
    room.entries["k"] = [room.entry(0, 2.0), room.entry(1), room.entry(2, active=False), room.entry(3, age_s=4)]
    return room


def test_before_the_engine_has_said_anything_nothing_is_known(room: Room) -> None:
    row = room.peers.look()
    assert (row.enabled, row.gpu_key, row.why, row.me, row.peers) == (False, None, UNKNOWN, None, ())


def test_shares_are_those_of_the_schedule_and_the_dead_are_not_listed(room: Room) -> None:
    room.peers.engine_says(MINE)
    row = room.peers.look()
    assert row.enabled
    assert row.me is not None
    assert (row.me.slot, row.me.share_pct, row.me.busy_pct, row.me.heartbeat_age_ms) == (1, 33.333, 25.0, 100)
    assert [(peer.slot, peer.share_pct, peer.active) for peer in row.peers] == [(0, 66.667, True), (2, 0.0, False)]


def test_with_nobody_active_shares_are_those_of_all(room: Room) -> None:
    room.entries["k"] = [replace(one, active=False) for one in room.entries["k"]]
    room.peers.engine_says(MINE)
    row = room.peers.look()
    assert row.me is not None
    assert [row.me.share_pct, *(peer.share_pct for peer in row.peers)] == [25.0, 50.0, 25.0]


def test_ours_is_known_by_its_process_wherever_it_is(room: Room) -> None:
    """It may have lost its slot and taken another; a foreign process in its old slot is not ours."""
    room.peers.engine_says(MINE)
    mine = room.entries["k"][1]
    room.entries["k"] = [replace(mine, slot=9), room.entry(1, pid=999)]
    row = room.peers.look()
    assert row.me is not None
    assert (row.me.slot, [peer.pid for peer in row.peers]) == (9, [999])


def test_a_registry_that_could_not_be_read_at_the_greeting_is_read_later(room: Room) -> None:
    """Ours is found with the first look that succeeds."""
    kept = room.entries.pop("k")
    room.peers.engine_says(MINE)
    assert room.peers.look().me is None
    room.entries["k"] = kept
    row = room.peers.look()
    assert row.me is not None
    assert row.me.slot == 1


def test_an_engine_that_shares_nothing_says_why(room: Room) -> None:
    room.peers.engine_says(GpuShare(why="it was turned off"))
    assert room.peers.look().why == "it was turned off"
    room.peers.engine_says(replace_key("gone"))
    row = room.peers.look()
    assert (row.enabled, row.gpu_key, row.why) == (False, "gone", "gone: there is none")


def replace_key(key: str) -> GpuShare:
    return MINE.model_copy(update={"gpu_key": key})


def test_who_comes_and_goes_is_news_and_who_was_there_is_not(room: Room) -> None:
    """Joined, another weight, left by dying; ours is marked."""
    room.peers.engine_says(MINE)
    room.peers.sweep()
    assert room.told() == []
    room.entries["k"] = [room.entry(0, 3.0), room.entry(1), room.entry(5)]
    room.peers.sweep()
    assert room.told() == [("weight", 0, False), ("joined", 5, False), ("left", 2, False)]
    room.clock.now += 1
    room.entries["k"] = [room.entry(1, 4.0), room.entry(5, age_s=3.5)]
    room.peers.sweep()
    assert room.told()[3:] == [("weight", 1, True), ("left", 0, False), ("left", 5, False)]


def test_a_registry_that_cannot_be_read_for_a_while_is_no_news(room: Room) -> None:
    room.peers.engine_says(MINE)
    room.peers.sweep()
    kept = room.entries.pop("k")
    room.peers.sweep()
    room.entries["k"] = kept
    room.peers.sweep()
    assert room.told() == []


def test_a_set_clock_hides_nobody() -> None:
    """Stamps from before count until they are renewed."""
    room = Room()

    class Clock(ManualClock):
        def wall(self) -> float:
            return self.now + step

    step = 0.0
    room.clock = Clock()
    room.peers = Peers(room.news, room.clock, room.read)
    room.entries["k"] = [room.entry(0), room.entry(1)]
    room.peers.engine_says(MINE)
    assert len(room.peers.look().peers) == 1
    step = 3600.0
    assert len(room.peers.look().peers) == 1
    room.clock.now += 4
    assert room.peers.look().peers == ()
