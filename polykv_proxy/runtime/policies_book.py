"""Admission policies in the journal: as JSON, so that a field more is no migration.

Law: what cannot be read is left out and said; it never keeps a proxy from starting. Beside each policy stands whether the pools
file declared it: such a one goes when the file no longer has it.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from dataclasses import dataclass

from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Policy, policy_of
from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.journal import Journal

_DECLARED = "declared"

log = logging.getLogger("polykv.admission")


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy."""

    policy: Policy
    declared: bool = False


class PoliciesBook:
    """The table of policies, by scope."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def read(self) -> dict[int, Entry]:
        """All of them."""

        def select(db: sqlite3.Connection) -> list[tuple[int, str]]:
            return db.execute("SELECT scope, policy FROM policies ORDER BY scope").fetchall()

        found: dict[int, Entry] = {}
        for scope, text in await self._journal.read(select):
            try:
                fields = json.loads(text)
                declared = bool(fields.pop(_DECLARED, False))
                found[scope] = Entry(policy_of(fields, for_pool=scope != DEFAULT_SCOPE), declared)
            except (ValueError, AttributeError, ApiError) as error:
                log.warning("the admission policy of pool %d in the journal is left out: %s", scope, error)
        return found

    async def put(self, scope: int, entry: Entry) -> None:
        """In place of the one before."""
        declared = {_DECLARED: True} if entry.declared else {}
        row = (scope, json.dumps({**entry.policy.as_object(), **declared}))
        await self._journal.transact(lambda db: db.execute("INSERT OR REPLACE INTO policies VALUES (?, ?)", row))

    async def drop(self, scope: int) -> None:
        """Gone, if there was one."""
        await self._journal.transact(lambda db: db.execute("DELETE FROM policies WHERE scope = ?", (scope,)))
