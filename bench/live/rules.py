"""The courier of examples/ by each of four rules, on a pool of its own before one real engine.

Law: every rule gets the same packages; all that a rule may see is what the proxy tells its clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from bench.sim.courier import Rhythm
from bench.sim.fleet import Turn, Work
from examples.courier.courier import AllAtOnce, ByCapacity, Courier, Pacing
from examples.courier.journal import Journal
from examples.courier.proxy import Capacity, Proxy
from examples.courier.work import Message, Package, Step

RULES = ("none", "naive", "advisory", "enforced")
WORDS = ("stone", "river", "light", "house", "paper", "green", "voice", "table", "water", "north")
GREEDY = {"temperature": 0, "seed": 1, "ignore_eos": True}


@dataclass
class Naive:
    """One more every so many seconds, and one when one is done, while the raw mean is at the floor: who warms up counts as zero."""

    journal: Journal
    every_s: float
    _next: float = 0.0
    _n_done: int = 0

    def may(self, report: Capacity, *, all_begun: bool) -> bool:
        now, n_done = self.journal.now, sum(event.kind == "delivered" for event in self.journal.events)
        if now < self._next and n_done == self._n_done:
            return False
        if now >= self._next:
            self._next = now + self.every_s
        self._n_done = n_done
        n = report.n_active + report.n_warming
        return n == 0 or (report.mean_active_tps or 0.0) * report.n_active / n >= self.journal.floor


@dataclass(frozen=True, slots=True)
class Plan:
    """What all rules get. `policy` are the fields that both kinds of ours have."""

    url: str
    floor: float
    work: Work
    rhythm: Rhythm
    policy: dict[str, object]

    def messages(self) -> list[Message]:
        """Those of the pool, about as long as the work says."""
        return [{"role": "system", "content": words(self.work.n_prefix, 0)}]

    def packages(self) -> list[Package]:
        """As the example takes them."""
        return [
            Package(str(number), [Step(words(t.n_prompt, 100 * number + i), t.n_answer, t.gap_s) for i, t in enumerate(turns)])
            for number, turns in enumerate(self.work.packages, 1)
        ]


def words(n: int, seed: int) -> str:
    """About so many tokens; others for each seed."""
    return " ".join(WORDS[(seed // 10**i + i) % 10] if i < 4 else WORDS[(i * 7 + seed) % 10] for i in range(max(4, n)))


def deliver(plan: Plan, rule: str) -> Journal:
    """One run."""
    return asyncio.run(_deliver(plan, rule))


async def _deliver(plan: Plan, rule: str) -> Journal:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=plan.url, timeout=httpx.Timeout(60, read=None), trust_env=False, limits=limits) as http:
        proxy = await Proxy.with_pool(http, plan.messages())
        if rule in {"advisory", "enforced"}:
            await proxy.set_policy(target_tps_per_session=plan.floor, mode=rule, **plan.policy)
        journal = Journal(plan.floor)
        pacing: Pacing = ByCapacity() if rule == "advisory" else AllAtOnce()
        if rule == "naive":
            pacing = Naive(journal, plan.rhythm.naive_s)
        courier = Courier(proxy, journal, plan.messages(), pacing, plan.rhythm.poll_s, f"{rule}-{proxy.pool_id}", dict(GREEDY))
        await courier.deliver(plan.packages())
        await proxy.release()
    return journal


def as_measured(journal: Journal, work: Work) -> Work:
    """The same work with the prompt and answer tokens that the engine really had."""
    sessions: dict[str, list[tuple[int, int]]] = {}
    for turn in sorted(journal.turns, key=lambda turn: turn.t):
        sessions.setdefault(turn.session.rsplit("-", 1)[-1], []).append((turn.n_prompt, turn.n_answer))
    packages: list[Sequence[Turn]] = []
    for number, turns in enumerate(work.packages, 1):
        told = sessions.get(str(number), [])
        packages.append([Turn(*(told[i] if i < len(told) else (t.n_prompt, t.n_answer)), t.gap_s) for i, t in enumerate(turns)])
    return Work(packages, work.n_prefix)
