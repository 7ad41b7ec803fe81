"""Admission policies in the journal: as JSON, so that a field more is no migration.

Law: what cannot be read is left out and said; it never keeps a proxy from starting.
"""

from __future__ import annotations

import json
import logging
import sqlite3

from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Policy, policy_of
from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.journal import Journal

log = logging.getLogger("polykv.admission")


class PoliciesBook:
    """The table of policies, by scope."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def read(self) -> dict[int, Policy]:
        """All of them."""

        def select(db: sqlite3.Connection) -> list[tuple[int, str]]:
            return db.execute("SELECT scope, policy FROM policies ORDER BY scope").fetchall()

        found: dict[int, Policy] = {}
        for scope, text in await self._journal.read(select):
            try:
                found[scope] = policy_of(json.loads(text), for_pool=scope != DEFAULT_SCOPE)
            except (ValueError, ApiError) as error:
                log.warning("the admission policy of pool %d in the journal is left out: %s", scope, error)
        return found

    async def put(self, scope: int, policy: Policy) -> None:
        """In place of the one before."""
        row = (scope, json.dumps(policy.as_object()))
        await self._journal.transact(lambda db: db.execute("INSERT OR REPLACE INTO policies VALUES (?, ?)", row))

    async def drop(self, scope: int) -> None:
        """Gone, if there was one."""
        await self._journal.transact(lambda db: db.execute("DELETE FROM policies WHERE scope = ?", (scope,)))
