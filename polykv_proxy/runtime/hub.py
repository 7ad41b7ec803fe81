"""What the parts of the runtime share: the ledger, the engine's client, the journal, the clock, and the running of commands.

Law: commands run in the order in which they were decided; a command that fails because the engine is gone has succeeded, since a
gone engine holds nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from polykv_proxy.core.commands import Command, DropCopy, EndSession, ExpirePool, FreeSeq, SavePool
from polykv_proxy.core.events import SlotEvent
from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.rates import Rates
from polykv_proxy.core.tally import PoolTally
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.engine.wire import Hello, State
from polykv_proxy.errors import ApiError, EngineError, JournalError
from polykv_proxy.ports import Clock
from polykv_proxy.runtime.journal import Journal
from polykv_proxy.runtime.savings import SavingsBook
from polykv_proxy.runtime.telemetry import Telemetry

log = logging.getLogger("polykv.runtime")

STATE_S = 3.0
"""The engine answers from a published snapshot at any time: longer silence means that it hangs."""
SUSPICION_S = 30.0
"""How long after a call that failed or was cancelled a sequence of nobody may still appear in the engine."""


class Hub:
    """Shared state of one runtime. `absent`: why there are no pools, `remedy`: what helps; `hello`: what the engine said last."""

    def __init__(self, ledger: Ledger, client: EngineClient, journal: Journal, clock: Clock) -> None:
        self.ledger = ledger
        self.client = client
        self.journal = journal
        self.clock = clock
        self.telemetry = Telemetry(ledger, clock, SavingsBook(journal, clock))
        self.rates = Rates()
        self.hello: Hello | None = None
        self.linked = False
        self.absent: str | None = None
        self.remedy = ""
        self.suspect_until = 0.0
        self.tally = PoolTally()
        self._silence = logging.WARNING
        """How loudly it is said that the engine does not answer: once, until it does."""
        self._queue: asyncio.Queue[Command] = asyncio.Queue()
        self._tasks: set[asyncio.Future[Any]] = set()
        self.on_expire: Callable[[int], Awaitable[None]] | None = None
        self.on_drop_copy: Callable[[int], Awaitable[None]] | None = None
        self.on_heard: Callable[[SlotEvent | None], None] = lambda _: None
        """Called with each slot event while its book is open; with None when the engine has told something else, or has gone."""
        self.on_wanted: Callable[[], None] = lambda: None
        """Called when somebody else than we may want a slot of the engine."""
        self.cleaning = asyncio.Lock()
        """Held while KV that failed a check may still be found in idle slots: nothing is built meanwhile."""

    def start(self) -> None:
        """Begin to run posted commands."""
        self.spawn(self._run_posted())

    async def stop(self) -> None:
        """Stop everything that was spawned."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Run something beside; its failure is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed: %s", error, exc_info=error)

    async def state(self) -> State | None:
        """The engine's snapshot, or None while it does not answer. What the reply to a verb announced is in it."""
        if not self.linked:
            return None
        try:
            async with asyncio.timeout(STATE_S):
                state = await self.client.state()
        except TimeoutError:
            log.log(self._silence, "no state: the engine has not answered for %g s", STATE_S)
            self._silence = logging.DEBUG
        except EngineError as error:
            log.info("no state: %s", error)
        else:
            self._silence = logging.WARNING
            return state
        return None

    def suspect(self) -> None:
        """The engine may hold a sequence that no pool has: sweeps look for it for a while."""
        self.suspect_until = self.clock.monotonic() + SUSPICION_S

    def post(self, commands: Iterable[Command]) -> None:
        """Run commands soon, in order."""
        for command in commands:
            self._queue.put_nowait(command)

    async def settle(self) -> None:
        """Wait until every posted command has run."""
        await self._queue.join()

    async def run(self, commands: Iterable[Command]) -> None:
        """Run commands now. JournalError when one cannot be written down."""
        for command in commands:
            await self._execute(command)

    async def run_each(self, commands: Iterable[Command]) -> None:
        """Run commands now. What the journal does not take is only logged: where KV lies is found out again at the next start."""
        for command in commands:
            try:
                await self._execute(command)
            except JournalError as error:
                log.warning("%s was not written down: %s", command, error)

    async def save_pool(self, pool_id: int) -> None:
        """Write down what has changed of a pool. One that is being made, failed or is being released has no row, and gets none."""
        pool = self.ledger.tree.get(pool_id)
        if pool is not None:
            await self.journal.update_pool(pool, self.ledger.placement(pool_id))

    def require_pools(self) -> None:
        """ApiError 501 when there are none: why, and what helps."""
        if self.absent is not None:
            raise ApiError("pools_unsupported", f"pools are off: {self.absent}; {self.remedy}")

    def require_engine(self) -> Hello:
        """What the engine said. ApiError 501 when it has no pools, 503 when it is away or starting."""
        self.require_pools()
        if self.hello is None:
            raise ApiError("engine_starting", "the engine is starting; try again shortly", retry_after_s=1)
        if not self.linked:
            raise ApiError("engine_unavailable", "the engine does not answer; it is being restarted", retry_after_s=2)
        return self.hello

    @property
    def boot_id(self) -> str:
        """Boot of the engine that was seen last; empty before the first."""
        return self.ledger.facts.boot_id if self.ledger.facts else ""

    async def _run_posted(self) -> None:
        while True:
            command = await self._queue.get()
            try:
                await self.run_each([command])
            finally:
                self._queue.task_done()

    async def _execute(self, command: Command) -> None:
        try:
            if isinstance(command, FreeSeq):
                if command.boot_id == self.boot_id:
                    await self.client.free_seq(command.seq)
            elif isinstance(command, EndSession):
                await self.client.end_session(command.number)
            elif isinstance(command, SavePool):
                await self.save_pool(command.pool_id)
            elif isinstance(command, DropCopy) and self.on_drop_copy is not None:
                await self.on_drop_copy(command.pool_id)
            elif isinstance(command, ExpirePool) and self.on_expire is not None:
                await self.on_expire(command.pool_id)
        except EngineError as error:
            log.warning("%s: %s", command, error)
            self.suspect()
