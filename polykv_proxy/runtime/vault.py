"""Copies of pools' KV on disk: written, deleted, counted.

Law: one copy is written at a time. A pool never changes, so one copy is enough and stays true; losing it loses nothing else. The
file is there before the record says so and gone before the record is, and whatever goes wrong with files, pools work on without.
"""

from __future__ import annotations

import asyncio
import logging

from polykv_proxy.core.commands import Command
from polykv_proxy.core.pools import Pool, Residency, SavedCopy
from polykv_proxy.core.quarantine import Quarantine
from polykv_proxy.core.tally import Copied
from polykv_proxy.core.vault import Kept, file_bytes, shelf, to_drop, warmths
from polykv_proxy.errors import EngineError, EngineRefusedError, EngineUnavailableError, JournalError, SettingsError
from polykv_proxy.runtime.copy_folder import CopyFolder
from polykv_proxy.runtime.hub import Hub

log = logging.getLogger("polykv.vault")

MIN_FREE_BYTES = 64 * 1024 * 1024
"""Stays free on the disk: the journal, whose loss would cost more than a copy, is mostly on the same one."""
FIRST_PAUSE_S = 60.0
LAST_PAUSE_S = 3600.0
LEAST_PATIENCE_S = 30.0
SLOWEST_BYTES_PER_S = 5e6


def patience_s(n_bytes: int) -> float:
    """For how long a file of this size may be written or read before that is given up."""
    return LEAST_PATIENCE_S + n_bytes / SLOWEST_BYTES_PER_S


class Vault:
    """The copies of one hub. Without a folder, or with a limit of 0, it is off and keeps none."""

    def __init__(self, hub: Hub, folder: CopyFolder | None, limit: int) -> None:
        self._hub = hub
        self._folder = folder
        self.limit = limit if folder is not None else 0
        self._lock = asyncio.Lock()
        self._writing: int | None = None
        self._unwanted = False
        self._unfit: set[int] = set()
        self._excess = 1.0
        self._trouble: str | None = None
        self._pause_s = 0.0
        self._paused_until = 0.0

    @property
    def on(self) -> bool:
        """Are copies kept?"""
        return self.limit > 0

    @property
    def folder(self) -> CopyFolder:
        """Where the copies are. Only where there can be some."""
        assert self._folder is not None
        return self._folder

    def facts(self) -> dict[str, object]:
        """What there is, for people. `paused`: why nothing is written at the moment."""
        copies, tally = [pool.copy for pool in self._hub.ledger.tree if pool.copy is not None], self._hub.tally.copies
        return {
            "on": self.on,
            "bytes_used": sum(copy.n_bytes for copy in copies),
            "bytes_max": self.limit,
            "n_copies": len(copies),
            "paused": self._trouble,
            "n_saves": tally[Copied.WRITTEN],
            "n_restores": tally[Copied.READ],
            "n_refused": tally[Copied.REFUSED],
        }

    # -- the start ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Delete files without a pool, forget copies without their file, come under the limit. SettingsError without a folder."""
        if self._folder is None:
            return
        try:
            if self.on:
                await asyncio.to_thread(self._folder.make)
            await self._tidy()
            for copy in to_drop(shelf(self._hub.ledger.tree), 0, self.limit, float("inf")) or ():
                await self._delete(copy.pool_id)
        except OSError as error:
            if self.on:
                message = f"copies of KV cannot be kept: {error}; choose another --state-dir, or no --kv-disk-bytes"
                raise SettingsError(message) from error
            log.warning("copies of an earlier run are left: %s", error)

    async def _tidy(self) -> None:
        known = {pool.pool_id: pool.copy.n_bytes for pool in self._hub.ledger.tree if pool.copy is not None}
        missing = await asyncio.to_thread(self.folder.tidy, known)
        gone = [
            pool_id for pool_id in missing if (pool := self._hub.ledger.tree.get(pool_id)) is not None and pool.copy is not None
        ]
        if gone:
            log.warning("the copies of pools %s are gone from the disk: they are computed again when used", gone)
        for pool_id in gone:
            self._hub.post(self._hub.ledger.set_copy(pool_id, None))

    # -- writing --------------------------------------------------------------------------------------------------------------

    def lacks(self, pool: Pool | None) -> bool:
        """Could a copy of this pool be made now, and is there none?"""
        if pool is None or not self.on or self._hub.clock.monotonic() < self._paused_until:
            return False
        return pool.residency is Residency.RESIDENT and pool.copy is None and pool.pool_id not in self._unfit

    async def keep(self, pool_id: int, *, in_passing: bool = False) -> bool:
        """Make a copy of a pool that lacks one, if there is room and it is cheaper than to compute the pool again.

        `in_passing`: nobody waits for it. True when it was made; whatever fails is no failure of the caller's.
        """
        if not self.lacks(self._hub.ledger.tree.get(pool_id)):
            return False
        async with self._lock:
            pool = self._hub.ledger.tree.get(pool_id)
            if pool is None or not self.lacks(pool):
                return False
            try:
                return await self._keep(pool, in_passing=in_passing)
            except EngineUnavailableError as error:
                log.info("no copy of pool %d: %s", pool_id, error)
            except EngineRefusedError as error:
                self._refused(pool, error)
            except (EngineError, OSError) as error:
                self._pause(str(error))
        return False

    async def _keep(self, pool: Pool, *, in_passing: bool) -> bool:
        hello = self._hub.hello
        assert hello is not None, "a resident pool is in an engine that has greeted"
        start = pool.branch_pos if hello.cuts_files and pool.parent is not None else 0
        n_bytes = int(self._excess * file_bytes(pool, start, hello.kv_prices()))
        if self._leaving(pool, n_bytes, in_passing=in_passing) is None:
            return False
        n_bytes += 0 if hello.cuts_files else await self._checkpoint_bytes(pool)
        await asyncio.to_thread(self.folder.make)
        await self._tidy()
        if await self._has_no_place(pool.pool_id):
            return False
        free = await asyncio.to_thread(self.folder.free_bytes)
        if not self.lacks(self._hub.ledger.tree.get(pool.pool_id)):
            return False
        leaving = self._leaving(pool, n_bytes, in_passing=in_passing)
        if leaving is None:
            return False
        if free + sum(copy.n_bytes for copy in leaving) < n_bytes + MIN_FREE_BYTES:
            raise OSError(f"the disk has {free} bytes left, and a copy wants {n_bytes} and {MIN_FREE_BYTES} to spare")
        for copy in leaving:
            await self._delete(copy.pool_id)
        return await self._write(pool, start, n_bytes)

    async def _has_no_place(self, pool_id: int) -> bool:
        """Where a folder stands in the place of a copy, this pool has none until the next start; all others have theirs."""
        foreign = await asyncio.to_thread(self.folder.folder_in_place_of, pool_id)
        if foreign is None:
            return False
        log.warning("pool %d is not copied to disk: %s is a folder, which is not ours; take it away", pool_id, foreign)
        self._unfit.add(pool_id)
        return True

    def _leaving(self, pool: Pool, n_bytes: int, *, in_passing: bool) -> list[Kept] | None:
        """Which copies go for this one. None when it does not pay, or there is no room for it."""
        if not self._hub.rates.copy_pays(len(pool.own_tokens), n_bytes, written_in_passing=in_passing):
            return None
        tree = self._hub.ledger.tree
        return to_drop(shelf(tree), n_bytes, self.limit, warmths(tree)[pool.pool_id])

    async def _checkpoint_bytes(self, pool: Pool) -> int:
        state = await self._hub.client.state()
        return sum(seq.checkpoint_bytes for seq in state.seqs if seq.seq == str(pool.seq))

    async def _write(self, pool: Pool, start: int, n_bytes: int) -> bool:
        """From the call to a record that says so; nothing is awaited between the end of the writing and the record."""
        self._writing, self._unwanted = pool.pool_id, False
        try:
            size = await self._written(pool, start, n_bytes)
        finally:
            self._writing = None
        self._excess *= max(1.0, size / n_bytes)
        self._works()
        tree = self._hub.ledger.tree
        used = sum(other.copy.n_bytes for other in tree if other.copy is not None)
        wrong = Quarantine(self._hub.ledger).tainted(pool.seq, pool.prefix_len)
        if tree.get(pool.pool_id) is None or self._unwanted or wrong or used + size > self.limit:
            await asyncio.to_thread(self.folder.delete, pool.pool_id)
            return False
        self._hub.tally.copies[Copied.WRITTEN] += 1
        await self._run(self._hub.ledger.set_copy(pool.pool_id, SavedCopy(size, start)))
        return True

    async def _written(self, pool: Pool, start: int, n_bytes: int) -> int:
        """Have the engine write a file: its size. OSError when it is not there in time."""
        assert pool.seq is not None
        file, since = self.folder.file(pool.pool_id), self._hub.clock.monotonic()
        try:
            async with asyncio.timeout(patience_s(n_bytes)):
                await self._hub.client.save_seq(pool.seq, file, start)
        except TimeoutError:
            raise OSError(f"writing {n_bytes} bytes took longer than {patience_s(n_bytes):.0f} s") from None
        took = self._hub.clock.monotonic() - since
        size = await asyncio.to_thread(self.folder.size, pool.pool_id)
        if size is None:
            raise OSError(f"the engine says that it wrote {file}, and it is not there: it seems to have other disks than the proxy")
        self._hub.rates.write.note(size, took)
        return size

    def _refused(self, pool: Pool, error: EngineRefusedError) -> None:
        if error.kind == "lora":
            self._unfit.add(pool.pool_id)
        elif error.kind != "stale_seq":
            self._pause(f"the engine answered {error.status} {error.kind}: {error.message}")

    def _pause(self, why: str) -> None:
        if self._trouble is None:
            log.warning("pools are not copied to disk for the time being, and work on as before: %s", why)
        self._trouble = why
        self._hub.tally.copies[Copied.FAILED] += 1
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)
        self._paused_until = self._hub.clock.monotonic() + self._pause_s

    def _works(self) -> None:
        if self._trouble is not None:
            log.warning("pools are copied to disk again")
        self._trouble, self._pause_s = None, 0.0

    # -- deleting -------------------------------------------------------------------------------------------------------------

    async def refuse(self, pool_id: int, why: str) -> None:
        """A copy could not be used: it is deleted, and the pool is computed from its tokens."""
        log.warning("the copy of pool %d is deleted: %s", pool_id, why)
        self._hub.tally.copies[Copied.REFUSED] += 1
        await self.forget(pool_id)

    async def forget(self, pool_id: int) -> None:
        """Delete the copy of a pool, also one that is being written. It is not used again, even where it cannot be deleted."""
        if self._folder is None:
            return
        if self._writing == pool_id:
            self._unwanted = True
            return
        try:
            await self._delete(pool_id)
        except OSError as error:
            self._pause(f"the copy of pool {pool_id} cannot be deleted: {error}")
            await self._run(self._hub.ledger.set_copy(pool_id, None))

    async def _delete(self, pool_id: int) -> None:
        await asyncio.to_thread(self.folder.delete, pool_id)
        await self._run(self._hub.ledger.set_copy(pool_id, None))

    async def _run(self, commands: list[Command]) -> None:
        try:
            await self._hub.run(commands)
        except JournalError as error:
            log.warning("a copy was not written down, the next start finds out: %s", error)
