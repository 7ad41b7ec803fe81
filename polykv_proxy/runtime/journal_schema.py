"""The journal's tables and their migrations.

Law: a step is added, never edited; `PRAGMA user_version` counts the steps that a file has seen.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

STEPS = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
    CREATE TABLE pools (
        pool_id INTEGER PRIMARY KEY,
        name TEXT UNIQUE,
        parent INTEGER,
        branch_pos INTEGER NOT NULL,
        own_tokens BLOB NOT NULL,
        prefix_hash TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        source TEXT NOT NULL,
        ttl_s REAL,
        created_ts REAL NOT NULL,
        last_access_ts REAL NOT NULL,
        boot_id TEXT,
        seq TEXT,
        cells INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE TABLE idempotency (
        key TEXT PRIMARY KEY,
        body_hash TEXT NOT NULL,
        status INTEGER NOT NULL,
        reply TEXT NOT NULL,
        created_ts REAL NOT NULL
    ) STRICT;
    """,
    """
    ALTER TABLE pools ADD COLUMN base TEXT;
    ALTER TABLE pools ADD COLUMN n_shared INTEGER NOT NULL DEFAULT 0;
    """,
    """
    ALTER TABLE pools ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE pools ADD COLUMN pin_owner TEXT;
    ALTER TABLE pools ADD COLUMN pin_until_ts REAL;
    """,
    """
    CREATE TABLE savings (
        day TEXT NOT NULL,
        pool_id INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        n_requests INTEGER NOT NULL,
        n_tokens INTEGER NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (day, pool_id, outcome)
    ) STRICT, WITHOUT ROWID;
    """,
    """
    ALTER TABLE pools ADD COLUMN copy_bytes INTEGER;
    ALTER TABLE pools ADD COLUMN copy_start INTEGER NOT NULL DEFAULT 0;
    """,
    """
    CREATE TABLE policies (scope INTEGER PRIMARY KEY, policy TEXT NOT NULL) STRICT;
    """,
)


class NewerJournalError(Exception):
    """The file was written by a newer version of this program."""


def migrate(db: sqlite3.Connection) -> None:
    """Bring a file to the present schema, step by step, each in its own transaction."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > len(STEPS):
        raise NewerJournalError(f"schema version {version}; this program knows {len(STEPS)}")
    for number in range(version, len(STEPS)):
        db.executescript(f"BEGIN; {STEPS[number]} PRAGMA user_version = {number + 1}; COMMIT;")


def check(db: sqlite3.Connection) -> None:
    """Are the tables those of a journal, and can all of them be read? sqlite3.DatabaseError, or ValueError for text that is none.

    1. Every column is there. 2. Texts are read when they are asked for; pools and answers are anyway. 3. Sums are finite.
    """
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as blank:
        migrate(blank)
        if not _columns(blank) <= _columns(db):
            raise sqlite3.DatabaseError("its tables are not those of a journal")
    db.execute("SELECT * FROM policies").fetchall()
    db.execute("SELECT * FROM savings").fetchall()
    sums = "SELECT 1 FROM savings WHERE NOT (seconds BETWEEN 0 AND 1e12 AND n_requests >= 0 AND n_tokens >= 0) LIMIT 1"
    if db.execute(sums).fetchone() is not None:
        raise sqlite3.DatabaseError("there are sums of savings that cannot be")


def _columns(db: sqlite3.Connection) -> set[tuple[str, str]]:
    tables = "SELECT tables.name, columns.name FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns"
    return set(db.execute(f"{tables} WHERE tables.type = 'table'"))
