"""Who is attached where, as admission counts it: named sessions that have not ended, and unnamed requests while they run.

Law: a newcomer counts from the step that admits it. If nobody confirms the session, it goes with its request.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

ALPHA = 0.3


@dataclass(frozen=True, slots=True)
class Departed:
    """A session is gone, and left this pool (None: it had none)."""

    pool_id: int | None


@dataclass(slots=True)
class Attached:
    """One session: its pool, and the admitted requests that hold it until the ledger of sessions does (`confirmed`)."""

    pool_id: int | None
    confirmed: bool
    reqs: set[int]


class Attachments:
    """All of them. Unnamed requests are their own sessions."""

    def __init__(self) -> None:
        self._of: dict[str | int, Attached] = {}
        self._per_pool: Counter[int | None] = Counter()
        self._paused: dict[str | int, float] = {}

    def __len__(self) -> int:
        return len(self._of)

    def known(self, session: str | None) -> bool:
        """Is it a session that goes on?"""
        return session is not None and session in self._of

    def per_pool(self) -> Counter[int | None]:
        """Sessions of each pool; None: of no pool."""
        return self._per_pool

    def paused(self, since: float) -> int:
        """Sessions whose last request ended then or later: between turns, and back any moment."""
        for key, at in list(self._paused.items()):
            if at >= since:
                break
            del self._paused[key]
        return len(self._paused)

    def begin(self, session: str | None, req: int, pool_id: int | None) -> None:
        """A request was admitted."""
        key = req if session is None else session
        self._paused.pop(key, None)
        one = self._of.get(key)
        if one is None:
            self._of[key] = Attached(pool_id, confirmed=False, reqs={req})
            self._per_pool[pool_id] += 1
        else:
            one.reqs.add(req)

    def confirm(self, session: str, pool_id: int | None) -> None:
        """The ledger has this session, attached there."""
        one = self._of.get(session)
        if one is None:
            one = self._of[session] = Attached(pool_id, confirmed=True, reqs=set())
        else:
            self._uncount(one.pool_id)
        self._per_pool[pool_id] += 1
        one.pool_id, one.confirmed = pool_id, True

    def end(self, session: str) -> Departed | None:
        """The ledger no longer has it; None when nobody had."""
        return self._drop(session)

    def closed(self, session: str | None, req: int, now: float) -> Departed | None:
        """A request is over; None when its session stays."""
        key = req if session is None else session
        one = self._of.get(key)
        if one is None:
            return None
        one.reqs.discard(req)
        if not one.reqs and one.confirmed:
            self._paused[key] = now
        return None if one.confirmed or one.reqs else self._drop(key)

    def _drop(self, key: str | int) -> Departed | None:
        one = self._of.pop(key, None)
        self._paused.pop(key, None)
        if one is None:
            return None
        self._uncount(one.pool_id)
        return Departed(one.pool_id)

    def _uncount(self, pool_id: int | None) -> None:
        self._per_pool[pool_id] -= 1
        if not self._per_pool[pool_id]:
            del self._per_pool[pool_id]


class Turnover:
    """How often room comes free: the average time between two departures. None before the second."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._average: float | None = None

    def left(self, now: float) -> None:
        """Somebody left."""
        if self._last is not None:
            took = max(0.0, now - self._last)
            self._average = took if self._average is None else (1 - ALPHA) * self._average + ALPHA * took
        self._last = now

    def wait_s(self, now: float, n_before: int = 0) -> float | None:
        """Until the next leaves, and `n_before` more; longer when none came for longer than usual."""
        if self._average is None or self._last is None:
            return None
        since = now - self._last
        first = self._average - since if since < self._average else since
        return first + n_before * self._average
