"""Sessions: the caller's names for conversations, and the integers that the engine knows them by.

Law: an integer is never handed out twice in the life of a ledger; nothing of the caller's text reaches the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

MAX_ID = 128
_OWN = 1 << 60
"""Far above the integers of sessions: the engine takes 64 bits."""


def valid_session_id(text: str) -> bool:
    """1 to 128 printable ASCII characters."""
    return 0 < len(text) <= MAX_ID and all(" " <= char <= "~" for char in text)


def is_own(number: int) -> bool:
    """Does the engine know work of our own by this integer?"""
    return number >= _OWN


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation. `n_streams` counts its open requests, `n_active` those past their first token. Times: Unix seconds."""

    session_id: str
    number: int
    created_ts: float
    last_used_ts: float
    pool_id: int | None = None
    n_streams: int = 0
    n_active: int = 0
    n_turns: int = 0

    @property
    def state(self) -> str:
        """`idle`, `warming` (running, no token yet) or `active`."""
        if self.n_active:
            return "active"
        return "warming" if self.n_streams else "idle"


class SessionLedger:
    """All named sessions that have not ended."""

    def __init__(self, first_number: int = 1) -> None:
        self._by_id: dict[str, Session] = {}
        self._ids: dict[int, str] = {}
        self._of_pool: dict[int | None, dict[str, None]] = {}
        self._next = first_number
        self.listeners: list[Callable[[Session | None, Session | None], None]] = []
        """Told of each record before and after; None for what was not, or is no more."""

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, session_id: str) -> Session | None:
        """The session of that name."""
        return self._by_id.get(session_id)

    def by_number(self, number: int) -> Session | None:
        """The session that the engine knows by this integer."""
        session_id = self._ids.get(number)
        return None if session_id is None else self._by_id[session_id]

    def take_own(self) -> int:
        """An integer for work of our own, which is nobody's session."""
        self._next += 1
        return _OWN + self._next - 1

    def open(self, session_id: str, now: float) -> Session:
        """The session of that name, made when new, used now."""
        session = self._by_id.get(session_id)
        if session is None:
            session = Session(session_id, self._next, now, now)
            self._next += 1
            self._ids[session.number] = session_id
        session = replace(session, last_used_ts=now)
        self._enter(session)
        return session

    def put(self, session: Session) -> None:
        """Replace the record of a session that exists; one that has ended stays ended."""
        if self._ids.get(session.number) == session.session_id:
            self._enter(session)

    def _enter(self, session: Session) -> None:
        before = self._by_id.get(session.session_id)
        self._by_id[session.session_id] = session
        if before is None or before.pool_id != session.pool_id:
            self._leave(before)
            self._of_pool.setdefault(session.pool_id, {})[session.session_id] = None
        for listener in self.listeners:
            listener(before, session)

    def end(self, session_id: str) -> Session | None:
        """Forget a session. Its integer is not used again."""
        session = self._by_id.pop(session_id, None)
        if session is not None:
            del self._ids[session.number]
            self._leave(session)
            for listener in self.listeners:
                listener(session, None)
        return session

    def _leave(self, session: Session | None) -> None:
        """It is no longer attached where it was."""
        if session is not None:
            there = self._of_pool[session.pool_id]
            del there[session.session_id]
            if not there:
                del self._of_pool[session.pool_id]

    def expired(self, now: float, ttl_s: float) -> list[Session]:
        """Sessions with nothing running that were last used `ttl_s` or longer ago."""
        return [s for s in self._by_id.values() if not s.n_streams and now - s.last_used_ts >= ttl_s]

    def of_pool(self, pool_id: int) -> list[Session]:
        """Sessions attached to a pool."""
        return [self._by_id[session_id] for session_id in self._of_pool.get(pool_id, ())]
