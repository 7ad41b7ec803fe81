"""A crowd: hundreds of clients at once and of all manners. Each request must end by an answer of its kind, and nobody may starve.

Law: uses what pools it is told of and makes none. It runs in a process of its own, so that it takes no turn from those who measure.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.e2e import soak_rude
from tests.e2e.soak_rude import CHAT, WORDS

HANG_GUARD_S = 180.0
SYSTEM = "You are clerk number {} of a large office: be brief, be polite and never promise a date."
MOST_UNFAIR = 8.0
"""The longest wait for an answer, in medians of those about that time."""
FEW = 50
"""Waits that make a median worth the name."""


@dataclass
class Figures:
    """What became of the requests of a crowd."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    """From sending to the first byte, of those who waited for a slot and stayed."""
    served: Counter[int] = field(default_factory=Counter)
    """Answers by client."""
    unfair: float = 0.0
    """The longest wait, in medians of the waits around it."""
    broken: list[str] = field(default_factory=list)

    def told(self) -> str:
        """In one line."""
        cuts, longest = statistics.quantiles(self.waits_s, n=100), max(self.waits_s)
        waits = f"waits: median {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s, longest {longest:.2f} s"
        fair = f"at worst {self.unfair:.1f} medians of their time; answers a client: {min(self.served.values())} to "
        return f"{waits}; {fair}{max(self.served.values())}"


class Crowd:
    """Clients of a proxy at `url` until `seconds` are over. `pools`: names of pools made of SYSTEM and their number."""

    def __init__(self, url: str, pools: list[str], body_limit: int, seconds: float) -> None:
        self.url, self.pools, self.body_limit = url, pools, body_limit
        self.end = time.monotonic() + seconds
        self.figures = Figures()
        self.recent: deque[float] = deque(maxlen=1000)

    async def run(self, n_clients: int) -> Figures:
        """All of them to their ends. Nobody begins anew once something has broken."""
        self.figures.served.update(dict.fromkeys(range(n_clients), 0))
        timeout, connector = aiohttp.ClientTimeout(total=HANG_GUARD_S), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, timeout=timeout, connector=connector, trust_env=False) as http:
            await asyncio.gather(*(self.live(Client(self, http, number)) for number in range(n_clients)))
        return self.figures

    async def live(self, client: Client) -> None:
        while time.monotonic() < self.end and not self.figures.broken:
            what = client.choose()
            try:
                status = await what()
            except Exception as error:  # whatever it is, the request had no answer
                self.figures.broken.append(f"client {client.number}, {what.__name__}: {error!r}")
                return
            self.figures.counts[what.__name__, status] += 1

    def waited(self, client: int, seconds: float) -> None:
        """A request that stayed got its first byte."""
        self.figures.served[client] += 1
        self.figures.waits_s.append(seconds)
        self.recent.append(seconds)
        if len(self.recent) >= FEW:
            self.figures.unfair = max(self.figures.unfair, seconds / statistics.median(self.recent))


class Client:
    """One of the crowd. Every act returns the status of its answer, 0 where it left without one."""

    def __init__(self, crowd: Crowd, http: aiohttp.ClientSession, number: int) -> None:
        self.crowd, self.http, self.number, self.dice = crowd, http, number, random.Random(number)
        self.acts: list[tuple[int, Callable[[], Awaitable[int]]]] = [
            (8, self.pooled), (6, self.pooled_stream), (4, self.plain), (4, self.plain_stream), (4, self.session), (5, self.leave),
            (1, self.oversized), (2, self.malformed),
        ]  # fmt: skip

    def choose(self) -> Callable[[], Awaitable[int]]:
        weights, acts = zip(*self.acts, strict=True)
        return self.dice.choices(acts, weights)[0]

    def body(self, *, pool: bool, **more: object) -> dict[str, Any]:
        """A short question, on one of the pools or on none."""
        n = self.dice.randrange(len(self.crowd.pools))
        said = " ".join(self.dice.choices(WORDS, k=self.dice.randrange(3, 12)))
        system = [{"role": "system", "content": SYSTEM.format(n)}] if pool else []
        named = {"pool_id": self.crowd.pools[n]} if pool else {}
        messages = [*system, {"role": "user", "content": said}]
        return {"messages": messages, "max_tokens": self.dice.randrange(1, 9), "temperature": 0, **named, **more}

    async def pooled(self) -> int:
        return await self._whole(self.body(pool=True))

    async def plain(self) -> int:
        return await self._whole(self.body(pool=False))

    async def session(self) -> int:
        """A name that nobody else uses, given back at once."""
        name = f"crowd-{self.number}"
        status = await self._whole(self.body(pool=True, session_id=name))
        async with self.http.delete(f"/polykv/sessions/{name}") as reply:
            right(reply.status, 200)
        return status

    async def pooled_stream(self) -> int:
        return await self._stream(self.body(pool=True, stream=True))

    async def plain_stream(self) -> int:
        return await self._stream(self.body(pool=False, stream=True))

    async def leave(self) -> int:
        """Goes away at a moment of its choice, by close or by reset."""
        body = self.body(pool=self.dice.random() < 0.7, stream=True, ignore_eos=True)
        await soak_rude.leave(self.crowd.url, {**body, "max_tokens": 40}, self.dice)
        return 0

    async def oversized(self) -> int:
        return await soak_rude.oversized(self.crowd.url, self.crowd.body_limit, self.dice)

    async def malformed(self) -> int:
        return await soak_rude.malformed(self.crowd.url, self.dice)

    async def _whole(self, body: dict[str, Any]) -> int:
        began = time.monotonic()
        async with self.http.post(CHAT, json=body) as reply:
            text = await reply.text()
        right(reply.status, 200, text)
        self.crowd.waited(self.number, time.monotonic() - began)
        if not json.loads(text)["choices"]:
            raise AssertionError(f"an answer without choices: {text[:300]}")
        return reply.status

    async def _stream(self, body: dict[str, Any]) -> int:
        began = time.monotonic()
        async with self.http.post(CHAT, json=body) as reply:
            waited = time.monotonic() - began
            text = (await reply.read()).decode()
        right(reply.status, 200, text)
        self.crowd.waited(self.number, waited)
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        if not any(choice.get("finish_reason") for event in events for choice in event.get("choices", ())):
            raise AssertionError(f"a stream ended early: {text[-300:]}")
        return reply.status


def right(status: int, expected: int, text: str = "") -> None:
    if status != expected:
        raise AssertionError(f"status {status}, not {expected}: {text[:300]}")


def crowd(url: str, pools: list[str], body_limit: int, n_clients: int, seconds: float) -> Figures:
    """In this process, to the end."""
    return asyncio.run(Crowd(url, pools, body_limit, seconds).run(n_clients))
