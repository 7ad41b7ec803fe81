"""One runtime: ledger, journal, engine link, pools and requests, started and stopped together.

Law: what is started is stopped, in reverse; nothing here decides about pools.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polykv_proxy.core.admission.gate import Limits
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Policy
from polykv_proxy.core.ledger import OVERDUE_S, Ledger, LedgerLimits
from polykv_proxy.core.unmade import Unmade
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.engine.wire import SessionEnded
from polykv_proxy.errors import ApiError, EngineError, JournalError
from polykv_proxy.ports import Clock
from polykv_proxy.runtime.admission import Admission
from polykv_proxy.runtime.answers import api_error
from polykv_proxy.runtime.compaction import CompactionService
from polykv_proxy.runtime.copy_folder import CopyFolder
from polykv_proxy.runtime.declared import DeclaredPools
from polykv_proxy.runtime.glance import Glance
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.journal import Journal
from polykv_proxy.runtime.keeper import Keeper
from polykv_proxy.runtime.lifetimes import LifetimeService
from polykv_proxy.runtime.link import EngineLink
from polykv_proxy.runtime.orders import Declared
from polykv_proxy.runtime.pools import PoolService
from polykv_proxy.runtime.requests import RequestDesk
from polykv_proxy.runtime.rows import StateView
from polykv_proxy.runtime.self_check import SelfCheck
from polykv_proxy.runtime.state_folder import StateFolder
from polykv_proxy.runtime.vault import Vault
from polykv_proxy.runtime.verifier import Verifier
from polykv_proxy.runtime.view import View
from polykv_proxy.settings import Settings

log = logging.getLogger("polykv.runtime")

SWEEP_S = 1.0
PURGE_EVERY = 3600


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds for durations."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds."""
        return time.time()


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """`state_dir` None keeps the journal in memory, and no copies of KV. `sweep_s` None leaves `sweep`, `keeper` and `self_check`
    to the caller.

    `declared` are pools that there are to be, each after its parent. `verify_interval_s`: seconds after which an idle pool is
    verified again, None for never. `off`: why there are none, whatever the engine is; then it is not asked. `remedy`: what helps
    when the engine has none. `kv_disk_bytes`: how many bytes copies may take; 0 for none. `copy_grace_s`: how long they may take
    before the end. `admission`: bounds of all requests together; `policy`: the default one of the pools file. `gpu_share_key`: of
    the device, where it was given.
    """

    state_dir: Path | None = None
    limits: LedgerLimits = field(default_factory=LedgerLimits)
    sweep_s: float | None = SWEEP_S
    declared: Sequence[Declared] = ()
    verify_interval_s: float | None = None
    off: str | None = None
    remedy: str = "run an engine that has them"
    kv_disk_bytes: int = 0
    copy_grace_s: float = 10.0
    admission: Limits = field(default_factory=Limits)
    policy: Policy | None = None
    gpu_share_key: str | None = None

    @classmethod
    def of(
        cls, settings: Settings, state_dir: Path | None, declared: Sequence[Declared], policy: Policy | None, remedy: str
    ) -> RuntimeOptions:
        """What the settings say."""
        return cls(
            state_dir,
            LedgerLimits(settings.max_pool_objects, settings.session_ttl_s, settings.pool_grace_s),
            declared=declared,
            verify_interval_s=settings.verify_interval_s,
            off="the proxy was started with --off" if settings.off else None,
            remedy=remedy,
            kv_disk_bytes=settings.kv_disk_bytes or 0,
            copy_grace_s=settings.stop_grace_s,
            admission=Limits(settings.max_running, settings.max_queued),
            policy=policy,
            gpu_share_key=settings.gpu_share_key if settings.gpu_share != "off" else None,
        )


class Runtime:
    """The running whole. Made by `Runtime.start`; `stop` ends it."""

    def __init__(self, hub: Hub, vault: Vault, pools: PoolService, folder: StateFolder | None, options: RuntimeOptions) -> None:
        self.hub = hub
        self.vault = vault
        self.pools = pools
        self.keeper = Keeper(hub, pools, vault)
        self.lifetimes = LifetimeService(hub, pools, vault)
        self.compaction = CompactionService(hub, self.lifetimes)
        self.verifier = Verifier(hub, pools)
        self.self_check: SelfCheck | None = None
        self.admission = Admission(hub, options.admission)
        self.requests = RequestDesk(hub, pools, self.admission)
        self.link = EngineLink(hub, options.remedy)
        self.declared = DeclaredPools(hub, pools, self.lifetimes, self.admission, self.link, declared=options.declared)
        self.view = View(hub.ledger, hub.telemetry, hub.clock)
        self.view.ruling = self.admission.ruling
        self.glance = Glance(hub, self.view)
        self._folder = folder
        self._options = options
        self._declaring: asyncio.Future[None] | None = None
        self._relief: asyncio.Future[None] | None = None
        self._saved_access: dict[int, float] = {}

    @classmethod
    async def start(cls, client: EngineClient, options: RuntimeOptions, clock: Clock | None = None) -> Runtime:
        """Take the state folder, read the journal, begin to follow the engine. SettingsError when the folder cannot be used."""
        clock = clock or SystemClock()
        folder = StateFolder(options.state_dir) if options.state_dir is not None else None
        journal = Journal(folder.journal_path if folder else None)
        try:
            found = await journal.open(clock.wall())
        except BaseException:
            if folder is not None:
                folder.close()
            raise
        ledger = Ledger(options.limits, first_number=(found.run << 31) + 1, next_pool_id=found.next_pool_id)
        for pool, placement in found.pools:
            ledger.restore(pool, placement)
        hub = Hub(ledger, client, journal, clock)
        hub.telemetry.peers.expect(options.gpu_share_key)
        await hub.telemetry.savings.load()
        view = View(ledger, hub.telemetry, clock)

        vault = Vault(hub, CopyFolder(folder.copies_path) if folder else None, options.kv_disk_bytes)
        runtime = cls(hub, vault, PoolService(hub, vault, view.pool, found.replies), folder, options)
        view.ruling = runtime.admission.ruling
        hub.on_expire, hub.on_drop_copy = runtime._expire, vault.forget
        runtime.pools.on_unwanted = runtime.lifetimes.release_unwanted
        try:
            await vault.open()
            await runtime.admission.load()
            await runtime.admission.declare(DEFAULT_SCOPE, options.policy)
        except BaseException:
            await runtime._close()
            raise
        hub.start()
        if options.off is None:
            hub.spawn(runtime.link.run())
        else:
            hub.absent, hub.remedy = options.off, options.remedy
        hub.spawn(runtime.pools.maker.room.expendables.run())
        runtime._declaring = hub.spawn(runtime.declared.run())
        if options.verify_interval_s is not None:
            runtime.self_check = SelfCheck(hub, runtime.pools, runtime.verifier, options.verify_interval_s)
            hub.on_wanted = runtime.self_check.give_way
            if options.sweep_s is not None:
                hub.spawn(runtime.self_check.run())
        if options.sweep_s is not None:
            hub.spawn(runtime._sweep_often(options.sweep_s))
            hub.spawn(runtime.keeper.run(options.sweep_s))
        return runtime

    def end_streams(self) -> None:
        """Whoever watches is told that the proxy is being stopped, and let go."""
        self.hub.telemetry.news.close()

    async def stop(self) -> None:
        """Stop all work, keep what must survive, let go of the folder."""
        self.end_streams()
        self.keeper.end()
        if self._declaring is not None:
            self._declaring.cancel()
            await asyncio.wait([self._declaring])
        await self.verifier.stop()
        await self.pools.stop()
        await self.keeper.copy_all(self._options.copy_grace_s)
        await self.hub.stop()
        with contextlib.suppress(JournalError):
            await self.hub.journal.save_uses(list(self.hub.ledger.tree))
            await self.hub.telemetry.savings.write()
        await self._close()

    async def _close(self) -> None:
        await self.hub.journal.close()
        await self.hub.client.close()
        if self._folder is not None:
            self._folder.close()

    @property
    def offers_pools(self) -> bool:
        """Can requests name pools and sessions here? False while nothing is known of the engine, or it has no pools."""
        return self.hub.absent is None and self.hub.ledger.facts is not None

    async def sweep(self) -> None:
        """End what time ends, and settle books whose HTTP is long over."""
        hub = self.hub
        now = hub.clock.wall()
        hub.post(hub.ledger.sweep(now))
        Unmade(hub.ledger).sweep(now)
        self.pools.turns.expire(now - hub.ledger.limits.session_ttl_s, hub.ledger.sessions.get)
        if hub.ledger.books.overdue(now, OVERDUE_S):
            state = await self.hub.state()
            if state is not None:
                hub.post(hub.ledger.settle_overdue(state.snapshot(), now))
        self.lifetimes.end_leases()
        if hub.linked and any(pool.seq is not None for pool in hub.ledger.tree):
            await self._relieve()
            await self.pools.maker.room.expendables.refresh()
        await self.pools.sweep()
        await self._save_access()
        hub.telemetry.peers.sweep()
        await hub.telemetry.savings.sweep()

    async def look(self) -> StateView:
        """Everything now, as the engine itself says: what the reply to a verb announced is in it."""
        return self.view.look(self.hub.hello, await self.hub.state())

    async def end_session(self, session_id: str) -> SessionEnded:
        """End a session: its requests are cancelled and its cells freed. ApiError 404 for an unknown one."""
        self.hub.require_engine()
        session = self.hub.ledger.end_session(session_id, self.hub.clock.wall())
        self.pools.turns.forget(session_id)
        try:
            return await self.hub.client.end_session(session.number)
        except EngineError as error:
            raise api_error(error) from error

    async def _relieve(self) -> None:
        """What is evicted may be copied to disk before: the sweep does not wait for long."""
        if self._relief is None or self._relief.done():
            self._relief = self.hub.spawn(self.pools.maker.room.relieve())
        await asyncio.wait([self._relief], timeout=SWEEP_S)

    async def _expire(self, pool_id: int) -> None:
        if not self.hub.ledger.expired(pool_id, self.hub.clock.wall()):
            return
        with contextlib.suppress(ApiError):
            await self.lifetimes.release(pool_id)
            log.info("pool %d: its ttl_s is over, released", pool_id)

    async def _sweep_often(self, every_s: float) -> None:
        n = 0
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.sweep()
                n += 1
                if n % PURGE_EVERY == 0:
                    await self.hub.journal.purge_replies(self.hub.clock.wall())
            except (EngineError, JournalError) as error:
                log.warning("sweep: %s", error)

    async def _save_access(self) -> None:
        """Pools with a `ttl_s` count from last use, also over a restart."""
        for pool in list(self.hub.ledger.tree):
            if pool.ttl_s is None or pool.seq is None or self._saved_access.get(pool.pool_id) == pool.last_used_ts:
                continue
            self._saved_access[pool.pool_id] = pool.last_used_ts
            await self.hub.save_pool(pool.pool_id)
