"""Prompts of our own, on the fake engine and on the real one: what a check of a pool rests on."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from polykv_proxy.core.events import SlotEvent, SlotEventKind
from polykv_proxy.core.prefix import as_tokens
from polykv_proxy.core.verification import LEAST, UNLIKE, distance
from polykv_proxy.engine.samples import Ask, Sample
from polykv_proxy.engine.wire import State
from tests.contract.conftest import FIRST_REQ, HANG_GUARD_S, Peer

POOL = list(range(100, 140))
SESSIONS = count(1 << 60)
"""A number that was ended is not used again."""


async def ask(peer: Peer, prompt: list[int], session: int, **more: object) -> Sample:
    return await peer.client.sample(Ask(as_tokens(prompt), next(FIRST_REQ), session, **{"n_probs": 20, **more}))


async def clear(peer: Peer, *sessions: int) -> State:
    for session in sessions:
        await peer.client.end_session(session)
    return await peer.client.state()


async def test_a_pool_answers_as_a_computation_without_it(peer: Peer) -> None:
    """By the candidates of the next token; another prompt has others. The sessions leave no cell behind."""
    made = await peer.make(POOL)
    one, two, three = (next(SESSIONS) for _ in range(3))
    fresh = await ask(peer, [*POOL, 7], one, reuse=False)
    await clear(peer, one)
    pooled = await ask(peer, [*POOL, 7], two, seq=made.ref, max_shared=len(POOL))
    assert (fresh.n_cached, fresh.n_shared, pooled.n_cached, pooled.n_shared) == (0, 0, 40, 40)
    assert len(fresh.log_probs) == len(pooled.log_probs) == 20
    assert distance(pooled.log_probs, fresh.log_probs) < LEAST
    other = await ask(peer, [*POOL, 8], three, reuse=False)
    assert distance(other.log_probs, fresh.log_probs) > LEAST
    state = await clear(peer, two, three)
    assert [slot.session for slot in state.slots if slot.session >= one] == []


async def test_a_session_goes_on_and_back_in_its_own_cells(peer: Peer) -> None:
    """Longer prompts go on where the last one ended; a shorter one computes its last token again. Without reuse nothing is kept."""
    session = next(SESSIONS)
    cached = [(await ask(peer, POOL[:n], session, reuse=n != 20)).n_cached for n in (20, 30, 31, 40, 25)]
    assert cached[:4] == [0, 20, 30, 31]
    assert cached[4] == 24
    assert (await ask(peer, POOL, session, reuse=False)).n_cached == 0
    await clear(peer, session)


async def test_a_slot_can_be_emptied_by_its_number(peer: Peer) -> None:
    """A prompt that must run there keeps nothing of what it held, and when its session ends the slot holds nothing."""
    session = next(SESSIONS)
    made = await peer.make(POOL)
    await peer.attach([*POOL, 7, 8], made.seq, 40)
    (held,) = [slot for slot in (await peer.client.state()).slots if slot.n_tokens]
    assert held.seq == made.seq
    assert (await ask(peer, [5], session, reuse=False, slot=held.slot, n_probs=0)).n_cached == 0
    state = await clear(peer, session)
    assert [slot.n_tokens for slot in state.slots] == [0, 0, 0, 0]


async def test_a_slot_that_works_is_emptied_before_anybody_else_gets_it(peer: Peer) -> None:
    """Who waits for a slot by its number is first, although others wait for any since before."""
    session = next(SESSIONS)
    made = await peer.make(POOL)
    busy = [asyncio.ensure_future(peer.attach([*POOL, 60 + n], made.seq, 40, n_predict=400)) for n in range(4)]
    slot, req = await _working(peer, 4)
    busy.append(asyncio.ensure_future(peer.attach([*POOL, 60, 61], made.seq, 40)))
    assert (await ask(peer, [5], session, reuse=False, slot=slot, n_probs=0)).n_cached == 0
    await clear(peer, session)
    assert [reply.status_code for reply in await asyncio.gather(*busy)] == [200] * 5
    seen = [event for event in peer.events if isinstance(event, SlotEvent) and event.slot == slot]
    launched = [event for event in seen if event.kind is SlotEventKind.LAUNCHED]
    launched = launched[[event.req for event in launched].index(req) :]
    (emptied,) = [event for event in launched if event.session == session]
    posted_us = emptied.t_us - emptied.us_queued
    assert next(event for event in launched if event.t_us > posted_us) is emptied


async def _working(peer: Peer, n: int) -> tuple[int, int]:
    """Once so many slots work: one of them and its request."""
    async with asyncio.timeout(HANG_GUARD_S):
        while True:
            busy = [slot for slot in (await peer.client.state()).slots if slot.state == "generating"]
            if len(busy) == n:
                return busy[0].slot, busy[0].req
            await asyncio.sleep(0)


async def test_what_cannot_be_compared_is_far(peer: Peer) -> None:
    """Without candidates there is no distance but the largest."""
    session = next(SESSIONS)
    assert distance((await ask(peer, POOL, session, n_probs=0)).log_probs, {1: 0.0}) == UNLIKE
    await clear(peer, session)


@pytest.mark.parametrize("n", [1, 2])
async def test_the_shortest_prompts_have_answers(peer: Peer, n: int) -> None:
    """One token, and one of a pool before it."""
    session = next(SESSIONS)
    made = await peer.make([900 + n])
    sample = await ask(peer, [900 + n, 101][:n], session, seq=made.ref, max_shared=1)
    assert sample.n_shared == n - 1
    await clear(peer, session)
