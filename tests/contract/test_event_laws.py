"""Events and counters, on the fake engine and on the real one."""

from __future__ import annotations

import asyncio

from polykv_proxy.core.events import SlotEvent, SlotEventKind
from polykv_proxy.engine.events import EngineEvents
from polykv_proxy.engine.wire import Counters, SlotTotals
from tests.contract.conftest import FIRST_REQ, HANG_GUARD_S, Peer

POOL = list(range(100, 140))


async def test_events_tell_one_whole_story_per_request(peer: Peer) -> None:
    """`launched`, `first_token`, `finished`, `released`, in this order, once each, with the facts of the reply."""
    made = await peer.make(list(range(6000, 6040)))
    req = next(FIRST_REQ)
    headers = {"x-polykv-req": req, "x-polykv-seq": made.seq, "x-polykv-shared": 40, "x-polykv-session": 77}
    reply = await peer.complete([*range(6000, 6040), 5, 6], headers, n_predict=3, ignore_eos=True)
    story = await peer.seen(req, 4)
    kinds = SlotEventKind
    assert [event.kind for event in story] == [kinds.LAUNCHED, kinds.FIRST_TOKEN, kinds.FINISHED, kinds.RELEASED]
    last = story[-1]
    assert (last.n_prompt, last.n_shared, last.n_cached, last.session, last.index) == (42, 40, 40, 77, 0)
    assert (str(last.seq), last.miss, last.n_decoded, last.reason) == (made.seq, None, 3, "limit")
    assert int(reply.headers["x-polykv-shared"]) == 40
    assert [event.t_us for event in story] == sorted(event.t_us for event in story)
    assert [event.us_prompt > 0 for event in story] == [False, True, True, True]
    assert [event.us_decode > 0 for event in story] == [False, True, True, True]
    assert last.us_decode > story[1].us_decode
    assert len({event.us_queued for event in story}) == 1
    assert last.us_queued >= 0
    assert {event.fill for event in story} == {False}
    assert len({event.task for event in story}) == 1


async def test_several_tasks_are_told_apart_by_index(peer: Peer) -> None:
    """A prompt array makes a task each, and each of them is released."""
    req = next(FIRST_REQ)
    await peer.complete([[300, 301, 302], [400, 401, 402]], {"x-polykv-req": req}, n_predict=1)
    async with asyncio.timeout(HANG_GUARD_S):
        while len(released := [e for e in await peer.seen(req, 2) if e.kind is SlotEventKind.RELEASED]) < 2:
            await asyncio.sleep(0.01)
    assert sorted(event.index for event in released) == [0, 1]


async def test_a_resumed_stream_has_no_gap(peer: Peer) -> None:
    """A reader that comes back with its last id gets what it missed, once, in order."""
    reader = EngineEvents(peer.client)
    first, second = next(FIRST_REQ), next(FIRST_REQ)
    seen: list[tuple[int, SlotEventKind]] = []

    async def read(until: int) -> None:
        async for event in reader.listen():
            if isinstance(event, SlotEvent):
                seen.append((event.req, event.kind))
                if seen[-1] == (until, SlotEventKind.RELEASED):
                    return

    reading = asyncio.ensure_future(read(first))
    await asyncio.sleep(0.2)
    await peer.complete([100, 101, 102], {"x-polykv-req": first}, ignore_eos=True)
    await asyncio.wait_for(reading, HANG_GUARD_S)
    await peer.complete([100, 101, 103], {"x-polykv-req": second}, ignore_eos=True)
    await asyncio.wait_for(read(second), HANG_GUARD_S)
    order = list(SlotEventKind)[:4]
    assert seen == [(first, kind) for kind in order] + [(second, kind) for kind in order]


async def until_counted(peer: Peer, n_decoded: int) -> list[Counters]:
    """The counters so far, once the slots together have decoded so many tokens."""
    async with asyncio.timeout(HANG_GUARD_S):
        while True:
            counters = [event for event in peer.events if isinstance(event, Counters)]
            if sum(totals.n_decoded for totals in latest(counters).values()) >= n_decoded:
                return counters
            await asyncio.sleep(0.01)


def latest(counters: list[Counters]) -> dict[int, SlotTotals]:
    return {slot.slot: slot.totals for one in counters for slot in one.slots}


async def test_counters_tell_of_every_slot_once_and_then_of_what_changes(peer: Peer) -> None:
    """The first reading has all slots; later ones those that moved; totals only grow, and end where `state` is."""
    start = latest(await until_counted(peer, 0))
    before = sum(totals.n_decoded for totals in start.values())
    headers = {"x-polykv-req": next(FIRST_REQ), "x-polykv-session": 1001}
    await peer.complete([100, 101, 102], headers, n_predict=30, ignore_eos=True)
    counters = await until_counted(peer, before + 30)
    assert len(counters[0].slots) == 4
    assert all(counters[n].update < counters[n + 1].update for n in range(len(counters) - 1))
    seen: dict[int, object] = {}
    for one in counters:
        for slot in one.slots:
            assert seen.get(slot.slot) != slot, "a slot that did not move is not told again"
            seen[slot.slot] = slot
    state = await peer.client.state()
    now = {slot.slot: slot.totals for slot in state.slots}
    assert sum(totals.n_decoded for totals in now.values()) == before + 30
    for number, was in start.items():
        grown = zip(was.model_dump().values(), now[number].model_dump().values(), strict=True)
        assert all(earlier <= later for earlier, later in grown)


async def test_a_reader_may_do_without_counters(peer: Peer) -> None:
    """With an interval of 0 only slot events come."""
    req = next(FIRST_REQ)
    found = []

    async def read() -> None:
        async with peer.client.event_stream(None, interval_ms=0) as stream:
            async for event in stream:
                found.append(event.event)
                if event.event == "released":
                    return

    reading = asyncio.ensure_future(read())
    async with asyncio.timeout(HANG_GUARD_S):
        while not found:
            await asyncio.sleep(0.01)
        await peer.complete([100, 101, 102], {"x-polykv-req": req}, n_predict=30, ignore_eos=True)
        await reading
    assert found == ["hello", *(kind.value for kind in list(SlotEventKind)[:4])]
