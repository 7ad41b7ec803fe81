"""The journal's tables and their migrations.

Law: a step is added, never edited; `PRAGMA user_version` counts the steps that a file has seen.
"""

from __future__ import annotations

import sqlite3

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
