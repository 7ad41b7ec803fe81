"""The courier itself: when a worker starts, and what it does until its package is delivered.

1. Look at the pool. 2. Start a worker if the pacing says so: by default when one more may start, nothing settles and nobody warms
up, and not before the last one started has its first token, so that each start is seen in the next report. 3. Look again
when somebody has begun or is done, or after `look_s`. A report that says no stops nobody who runs: workers go when they are done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from examples.courier.journal import Journal, Turn
from examples.courier.proxy import Capacity, Proxy, SaturatedError, TurnError
from examples.courier.work import Message, Package, Step


class Pacing(Protocol):
    """When one more worker may start. `all_begun`: was everybody's first token out before this report was asked for?"""

    def may(self, report: Capacity, *, all_begun: bool) -> bool:
        """Asked after each report, and again after each start until it says no."""
        ...


class ByCapacity:
    """One for each settled report that has room."""

    def may(self, report: Capacity, *, all_begun: bool) -> bool:
        """1. Who was started must show in the report; 2. settling and warming defer; 3. else as the proxy says."""
        return all_begun and not report.settling and report.n_warming == 0 and report.can_admit


class AllAtOnce:
    """Everybody; an enforced policy with a queue then lets them in one by one."""

    def may(self, report: Capacity, *, all_begun: bool) -> bool:
        """Always."""
        return True


@dataclass(slots=True)
class Worker:
    """One package on its way."""

    package: Package
    session: str
    messages: list[Message]
    begun: bool = False


@dataclass
class Courier:
    """One run. `messages` are those of the pool; `body` goes into every request; `name` makes its sessions its own."""

    proxy: Proxy
    journal: Journal
    messages: Sequence[Message]
    pacing: Pacing = field(default_factory=ByCapacity)
    look_s: float = 1.0
    name: str = "courier"
    body: dict[str, object] = field(default_factory=dict)
    _workers: list[Worker] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def deliver(self, packages: Sequence[Package]) -> None:
        """Until all are delivered, or have failed; the journal says which."""
        left = sorted(packages, key=lambda package: not package.urgent)
        async with asyncio.TaskGroup() as group:
            while left or self._workers:
                self._news.clear()
                all_begun = all(worker.begun for worker in self._workers)
                report = await self.proxy.capacity()
                self.journal.report(report)
                while left and (left[0].urgent or self.pacing.may(report, all_begun=all_begun)):
                    self._spawn(group, left.pop(0))
                    all_begun = False
                await self._pause()
        self.journal.report(await self.proxy.capacity())
        self.journal.decided(await self.proxy.decisions())

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self.look_s):
                await self._news.wait()
        except TimeoutError:
            pass

    def _spawn(self, group: asyncio.TaskGroup, package: Package) -> None:
        worker = Worker(package, f"{self.name}-{package.name}", list(self.messages))
        self._workers.append(worker)
        self.journal.note("spawn", worker.session)
        group.create_task(self._work(worker))

    async def _work(self, worker: Worker) -> None:
        """All steps, then its session ends: what it holds is given back at once."""
        try:
            for number, step in enumerate(worker.package.steps):
                if number:
                    await asyncio.sleep(worker.package.steps[number - 1].tools_s)
                await self._turn(worker, step)
            outcome = "delivered"
        except (TurnError, SaturatedError, httpx.HTTPError):
            outcome = "failed"
        try:
            await self.proxy.end_session(worker.session)
        except (TurnError, httpx.HTTPError):
            outcome = "failed"
        self.journal.note(outcome, worker.session)
        self._workers.remove(worker)
        self._news.set()

    async def _turn(self, worker: Worker, step: Step) -> None:
        """One answer, as often asked for as the proxy says that it is worth it."""
        worker.messages.append({"role": "user", "content": step.prompt})
        while True:
            try:
                answer = await self._answer(worker, step)
            except SaturatedError as refused:
                self.journal.note("refused", worker.session)
                if refused.retry_after_s is None:
                    raise
                await asyncio.sleep(refused.retry_after_s)
            else:
                worker.messages.append({"role": "assistant", "content": answer})
                return

    async def _answer(self, worker: Worker, step: Step) -> str:
        more = {**self.body, "overcommit": True} if worker.package.urgent else self.body
        asked, first, last = self.journal.now, None, 0.0
        texts: list[str] = []
        timings: dict[str, int] = {}
        async for chunk in self.proxy.turn(worker.session, worker.messages, step.max_tokens, **more):
            timings = chunk.get("timings", timings)
            text = "".join(choice.get("delta", {}).get("content") or "" for choice in chunk.get("choices", ()))
            if not text:
                continue
            texts.append(text)
            last = self.journal.now
            if first is None:
                first = last
            if not worker.begun:
                worker.begun = True
                self._news.set()
        if first is not None:
            n_answer = timings.get("predicted_n", len(texts))
            turn = Turn(worker.session, asked, first - asked, last - first, timings.get("prompt_n", 0), n_answer)
            self.journal.turns.append(turn)
        return "".join(texts)
