"""The journal: what must survive the proxy. Pools with their own tokens, the next ids, remembered replies.

Law: one SQLite connection, used by one worker thread; each public method is one transaction, all or nothing. A failed write is a
JournalError and has changed nothing. The journal never says that KV is there: it says where it was last seen.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from polykv_proxy.core.ledger import Placement
from polykv_proxy.core.pools import Pool
from polykv_proxy.core.prefix import Tokens
from polykv_proxy.errors import JournalError, SettingsError
from polykv_proxy.runtime.journal_rows import MOST_POOLS, count_of, pin_row, pool_of, row_of
from polykv_proxy.runtime.journal_schema import NewerJournalError, check, migrate

log = logging.getLogger("polykv.journal")
Result = TypeVar("Result")

IDEMPOTENCY_TTL_S = 24 * 3600.0
_AROUND_IT = frozenset(
    getattr(sqlite3, f"SQLITE_{name}") for name in ("PERM", "BUSY", "LOCKED", "NOMEM", "READONLY", "IOERR", "FULL", "CANTOPEN")
)
"""What SQLite says when the file may be whole and what is around it is not; all else is damage, or another program's file."""
_MOST_RUNS = 1 << 31

_SAVE = """
    INSERT INTO pools (pool_id, name, parent, branch_pos, own_tokens, prefix_hash, fingerprint, source, ttl_s, created_ts,
                       last_access_ts, boot_id, seq, cells, base, n_shared, pinned, pin_owner, pin_until_ts,
                       copy_bytes, copy_start)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (pool_id) DO UPDATE SET last_access_ts = excluded.last_access_ts, ttl_s = excluded.ttl_s,
                       boot_id = excluded.boot_id, seq = excluded.seq, cells = excluded.cells, base = excluded.base,
                       n_shared = excluded.n_shared, pinned = excluded.pinned, pin_owner = excluded.pin_owner,
                       pin_until_ts = excluded.pin_until_ts, copy_bytes = excluded.copy_bytes, copy_start = excluded.copy_start
"""
_UPDATE = """
    UPDATE pools SET last_access_ts = ?, ttl_s = ?, boot_id = ?, seq = ?, cells = ?, base = ?, n_shared = ?, pinned = ?,
                     pin_owner = ?, pin_until_ts = ?, copy_bytes = ?, copy_start = ? WHERE pool_id = ?
"""
_LOAD = """
    SELECT pool_id, name, parent, branch_pos, own_tokens, prefix_hash, fingerprint, source, ttl_s, created_ts, last_access_ts,
           boot_id, seq, cells, base, n_shared, pinned, pin_owner, pin_until_ts, copy_bytes, copy_start FROM pools ORDER BY pool_id
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """A remembered answer to a request with an Idempotency-Key."""

    key: str
    body_hash: str
    status: int
    reply: str
    created_ts: float


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a starting proxy finds. `run` numbers this start: no two starts of one journal share it."""

    run: int
    next_pool_id: int
    pools: tuple[tuple[Pool, Placement | None], ...]
    replies: tuple[Reply, ...]


class Journal:
    """The journal in a file, or in memory when `path` is None."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="polykv-journal")
        self._db: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None
        self.moved_aside: Path | None = None
        self.n_errors = 0

    async def open(self, now: float) -> Recovered:
        """Open, migrate, read. A file that is not a journal any more is moved aside and an empty one begun."""
        return await self._in_worker(lambda: self._open(now))

    async def close(self) -> None:
        """Close the file."""
        await self._in_worker(self._close)
        self._worker.shutdown(wait=False)

    async def reserve_pool_id(self, pool_id: int) -> None:
        """Never hand out this id, or one below it, again."""
        statement = "INSERT INTO meta VALUES ('next_pool_id', ?) ON CONFLICT (key) DO UPDATE SET value = max(value, excluded.value)"
        await self._write(lambda db: db.execute(statement, (pool_id + 1,)))

    async def save_pool(self, pool: Pool, placement: Placement | None, reply: Reply | None = None) -> None:
        """Write a pool, and the answer that announces it, in one transaction."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(_SAVE, row_of(pool, placement))
            if reply is not None:
                db.execute(
                    "INSERT OR REPLACE INTO idempotency VALUES (?, ?, ?, ?, ?)",
                    (reply.key, reply.body_hash, reply.status, reply.reply, reply.created_ts),
                )

        await self._write(write)

    async def save_terms(self, pools: Sequence[Pool]) -> None:
        """Write down names, times to live and pins of pools that are there, in this order, all or none."""
        rows = [(pool.name, pool.ttl_s, *pin_row(pool), pool.pool_id) for pool in pools]
        statement = "UPDATE pools SET name = ?, ttl_s = ?, pinned = ?, pin_owner = ?, pin_until_ts = ? WHERE pool_id = ?"
        await self._write(lambda db: db.executemany(statement, rows))

    async def update_pool(self, pool: Pool, placement: Placement | None) -> None:
        """Write what may change of a pool that is written down; one that is not, or not any more, stays unwritten."""
        pool_id, *row = row_of(pool, placement)
        await self._write(lambda db: db.execute(_UPDATE, (row[9], row[7], *row[10:], pool_id)))

    async def save_uses(self, pools: Sequence[Pool]) -> None:
        """Write down when pools that are there were last used, all or none."""
        rows = [(pool.last_used_ts, pool.pool_id) for pool in pools]
        await self._write(lambda db: db.executemany("UPDATE pools SET last_access_ts = ? WHERE pool_id = ?", rows))

    async def drop_pools(self, pool_ids: Sequence[int]) -> None:
        """Remove pools, all or none; unknown ids are fine."""
        rows = [(pool_id,) for pool_id in pool_ids]
        await self._write(lambda db: db.executemany("DELETE FROM pools WHERE pool_id = ?", rows))

    async def purge_replies(self, now: float) -> None:
        """Forget answers older than a day."""
        await self._write(lambda db: db.execute("DELETE FROM idempotency WHERE created_ts < ?", (now - IDEMPOTENCY_TTL_S,)))

    async def transact(self, job: Callable[[sqlite3.Connection], object]) -> None:
        """Write to a table of somebody else's, all or nothing."""
        await self._write(job)

    async def read(self, job: Callable[[sqlite3.Connection], Result]) -> Result:
        """Read from a table of somebody else's."""

        def run() -> Result:
            assert self._db is not None, "the journal is open"
            return job(self._db)

        return await self._in_worker(run)

    async def _in_worker(self, job: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._worker, job)

    async def _write(self, job: Callable[[sqlite3.Connection], object]) -> None:
        def run() -> None:
            assert self._db is not None, "the journal is open"
            self._check_there()
            try:
                with self._db:
                    self._db.execute("BEGIN IMMEDIATE")
                    job(self._db)
            except sqlite3.Error as error:
                raise JournalError(f"the journal cannot be written ({error}); nothing was changed") from error

        try:
            await asyncio.shield(self._in_worker(run))
        except JournalError:
            self.n_errors += 1
            raise

    def _check_there(self) -> None:
        """A file that was deleted takes writes in silence, and they end with the process."""
        if self._path is None:
            return
        try:
            there = _identity(self._path)
        except OSError as error:
            raise JournalError(f"the journal {self._path} is gone ({error.strerror}); nothing was changed") from error
        if there != self._opened:
            raise JournalError(f"the journal {self._path} was replaced by another file; nothing was changed")

    def _open(self, now: float) -> Recovered:
        try:
            return self._load(now)
        except NewerJournalError as error:
            raise SettingsError(
                f"{self._path} was written by a newer polykv-proxy ({error}); update, or choose another --state-dir"
            ) from error
        except (sqlite3.Error, ValueError) as error:  # ValueError: a row, or a text, that is none
            if self._path is None or getattr(error, "sqlite_errorcode", 0) & 0xFF in _AROUND_IT:
                raise SettingsError(f"the journal {self._path} cannot be opened: {error}; choose another --state-dir") from error
            self._move_aside(error, now)
            return self._load(now)

    def _load(self, now: float) -> Recovered:
        if self._path is not None:
            self._path.touch(mode=0o600)
            self._path.chmod(0o600)  # one of an older version, or that was copied
            self._opened = _identity(self._path)
        self._db = sqlite3.connect(self._path or ":memory:", isolation_level=None, check_same_thread=False)
        if self._path is not None:
            self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        migrate(self._db)
        check(self._db)
        return _recover(self._db, now)

    def _move_aside(self, error: Exception, now: float) -> None:
        assert self._path is not None
        self._close()
        aside = self._path.with_name(f"{self._path.name}.corrupt-{int(now)}")
        self._path.rename(aside)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self.moved_aside = aside
        log.warning("the journal was damaged (%s): moved to %s, starting without pools", error, aside)

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _recover(db: sqlite3.Connection, now: float) -> Recovered:
    meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
    run = count_of(meta.get("run", int(now) & 0xFFFFF), _MOST_RUNS) + 1
    next_pool_id = count_of(meta.get("next_pool_id", 1), MOST_POOLS)
    prefixes: dict[int, Tokens] = {}
    pools, orphans = [], []
    for row in db.execute(_LOAD).fetchall():
        if row[2] is not None and row[2] not in prefixes:
            log.warning("pool %s has lost its parent %s and with it the tokens they share: it is forgotten", row[0], row[2])
            orphans.append((row[0],))
            continue
        try:
            pool, placement = pool_of(row, prefixes)
        except ValueError as error:
            raise ValueError(f"pool {row[0]} cannot be read: {error}") from error
        prefixes[pool.pool_id] = pool.tokens
        pools.append((pool, placement))
    with db:  # all has been read: from here on the file is ours
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT OR REPLACE INTO meta VALUES ('run', ?)", (run,))
        db.execute("DELETE FROM idempotency WHERE created_ts < ?", (now - IDEMPOTENCY_TTL_S,))
        db.executemany("DELETE FROM pools WHERE pool_id = ?", orphans)
    replies = tuple(Reply(*row) for row in db.execute("SELECT key, body_hash, status, reply, created_ts FROM idempotency"))
    return Recovered(run, next_pool_id, tuple(pools), replies)
