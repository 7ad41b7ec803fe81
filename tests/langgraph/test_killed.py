"""Agents that are killed (SIGKILL) at each call that changes something, and go on from their checkpoint in another process.

Law: what was said in the end is what would have been said undisturbed; the last request was served from all of its pool; after
the leases nothing is left. `scripts/e2e langgraph` (`POLYKV_FULL_CASES`): every moment of every call; else one moment for each.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opencoti_langgraph import PoolClient
from tests.fakes.scripted_chat import Answer
from tests.langgraph.fleet import Fleet, fleet
from tests.langgraph.mortal import MOMENTS, PROGRAMS, Life
from tests.langgraph.real import served_tiny

HANG_GUARD_S = 120
FULL = bool(os.environ.get("POLYKV_FULL_CASES"))


def say(body: dict[str, Any]) -> Answer:
    """Words that depend on the whole conversation; a deep agent delegates first."""
    last = body["messages"][-1]
    if last["role"] == "user" and last["content"] == "delegate":
        return Answer(calls=[("task", {"description": f"task {n}", "subagent_type": "helper"}) for n in (1, 2)])
    heard = [[one["role"], one.get("content")] for one in body["messages"]]
    return Answer(f"reply {zlib.crc32(json.dumps(heard).encode())}.")


async def lived(life: Life) -> int:
    """The exit code of a life, which runs while the proxy serves it."""
    life.folder.mkdir(exist_ok=True)
    process = await asyncio.to_thread(life.start)
    await asyncio.to_thread(process.join, HANG_GUARD_S)
    return process.exitcode


async def said(life: Life) -> Any:
    """The words of a life that nothing disturbs."""
    assert await lived(replace(life, at=0)) == 0
    return life.told()["said"]


@asynccontextmanager
async def born(folder: Path, program: str) -> AsyncIterator[tuple[Fleet, Life]]:
    """A proxy of its own, and a life before it."""
    folder.mkdir()
    async with fleet(folder, n_ctx=16384) as world:
        world.say = say
        yield world, Life(world.client.base_url, folder, program)


async def check(world: Fleet, life: Life, words: Any) -> None:
    """Another process goes on; see the law above."""
    assert await said(life) == words
    (pool,) = [pool for pool in await world.listed() if pool["pool_id"] == life.told()["pool_id"]]
    assert life.told()["shared"] >= pool["prefix_len"]
    for seconds in (700, 4000, 4000):  # sessions, leaves, bases
        await world.later(seconds)
    assert await world.listed() == []
    assert await world.sessions() == []
    assert world.proxy.engine.seqs == {}


async def killed_at_each(folder: Path, program: str, dying: Callable[[Fleet, Life, int], Life]) -> int:
    """Die at the first of something, at the second, … until one life gets to its end. How many died."""
    async with born(folder / "undisturbed", program) as (_, life):
        words = await said(life)
    for at in range(1, 50):
        async with born(folder / str(at), program) as (world, life):
            code = await lived(dying(world, life, at))
            await check(world, life, words)
        if code == 0:
            return at - 1
        assert code == -signal.SIGKILL
    raise AssertionError("it never ends")


def moments() -> Iterable[Any]:
    return [pytest.param((moment,), id=moment) for moment in MOMENTS] if FULL else [pytest.param(tuple(MOMENTS), id="in-turn")]


@pytest.mark.parametrize("moments", moments())
@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_kill_at_any_call_loses_and_leaks_nothing(tmp_path: Path, program: str, moments: tuple[str, ...]) -> None:
    """Creating, forking, compacting, renewing, releasing, ending sessions."""
    n_died = await killed_at_each(
        tmp_path, program, lambda world, life, at: replace(life, at=at, moment=moments[at % len(moments)])
    )
    assert n_died >= 3


@pytest.mark.skipif(not FULL, reason="a minute; scripts/e2e langgraph")
@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_kill_while_the_model_answers(tmp_path: Path, program: str) -> None:
    """The same for each request to the model: the process is gone when the answer comes."""

    def dying(world: Fleet, life: Life, at: int) -> Life:
        def brain(body: dict[str, Any]) -> Answer:
            if len(world.asked) == at:
                os.kill(life.pid(), signal.SIGKILL)
            return say(body)

        world.say = brain
        return life

    assert await killed_at_each(tmp_path, program, dying) >= 3


@pytest.mark.engine
@pytest.mark.skipif(not FULL, reason="half a minute; scripts/e2e langgraph")
async def test_on_the_real_engine(tmp_path: Path, engine_path: Path) -> None:
    """One round over all calls of a conversation with compactions: greedy words are the same, so no wrong prefix was ever used."""
    with served_tiny(engine_path, tmp_path, "--session-ttl-s", "2") as served, PoolClient(served.url) as client:
        first = Life(served.url, tmp_path / "0", "agent", base_lease_s=6, fork_lease_s=3)
        words = await said(first)
        for at in range(1, len(first.calls()) + 1):
            life = replace(first, folder=tmp_path / str(at), at=at, moment=[*MOMENTS][at % len(MOMENTS)])
            assert await lived(life) == -signal.SIGKILL
            assert await said(life) == words
        async with asyncio.timeout(HANG_GUARD_S):
            while client.pools().pools:
                await asyncio.sleep(0.1)
        assert client.capacity().seq_ids_used == 0
