"""The books of running requests: who uses which pool and session until the engine says that it is over.

Law: a book closes on the engine's word (`released` or `dropped` for each of its tasks, or a refusal before any task was made),
on a new boot, or when the engine's state is read and does not know the request. Never on the end of HTTP alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from polykv_proxy.core.events import SlotEvent, SlotEventKind

_WHOLE = frozenset({"stop", "limit"})
"""How an answer ends that says how long answers are."""
_SETTLES = (SlotEventKind.RELEASED, SlotEventKind.DROPPED)


class Brought(StrEnum):
    """How a pool's KV came back for the request that needed it. A word of the reply."""

    REBUILT = "rebuilt"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class Book:
    """One request. `n_tasks` is what its body asks for (n, prompt arrays); `done_ts` is the end of its HTTP exchange.

    `active`: a first token is out. `brought`: its pool had no KV, and this is how it was brought back for it.
    `held_s`: how long until it could go to the engine. `miss`: why we named no sequence of its pool, which the engine cannot know.
    `n_decoded`: tokens of its finished tasks. `whole`: none of them was cut short. `request_id`: the caller's name for it.
    """

    req: int
    n_tasks: int
    opened_ts: float
    pool_id: int | None = None
    session: int | None = None
    open_tasks: frozenset[int] = frozenset()
    settled_tasks: frozenset[int] = frozenset()
    active: bool = False
    refused: bool = False
    brought: Brought | None = None
    held_s: float = 0.0
    miss: str | None = None
    done_ts: float | None = None
    n_decoded: int = 0
    whole: bool = True
    request_id: str | None = None

    @property
    def state(self) -> str:
        """`waiting`, `running`, or `finishing`: HTTP is over, the engine has not released it."""
        if self.done_ts is not None:
            return "finishing"
        return "running" if self.open_tasks else "waiting"

    @property
    def closed(self) -> bool:
        """Has the engine's word closed it?"""
        if self.refused and self.done_ts is not None and not self.open_tasks:
            return True
        return not self.open_tasks and len(self.settled_tasks) >= self.n_tasks


class Books:
    """All open books by request number."""

    def __init__(self) -> None:
        self._books: dict[int, Book] = {}
        self.on_close: Callable[[Book], None] = lambda _: None
        """Told of each book once, when it is closed for whatever reason."""

    def __iter__(self) -> Iterator[Book]:
        return iter(list(self._books.values()))

    def __len__(self) -> int:
        return len(self._books)

    def get(self, req: int) -> Book | None:
        """The open book of a request."""
        return self._books.get(req)

    def open(self, book: Book) -> None:
        """Enter a new book."""
        assert book.req not in self._books, "request numbers are not re-used"
        self._books[book.req] = book

    def mark_brought(self, req: int, how: Brought) -> None:
        """The pool of this request is brought back for it."""
        book = self._books.get(req)
        if book is not None:
            self._books[req] = replace(book, brought=how)

    def sent(self, req: int, held_s: float, miss: str | None) -> None:
        """The request may go to the engine now."""
        book = self._books.get(req)
        if book is not None:
            self._books[req] = replace(book, held_s=held_s, miss=miss)

    def note(self, event: SlotEvent) -> tuple[Book, Book] | None:
        """Take in an event: the book before and after, or None for a request without an open book."""
        before = self._books.get(event.req)
        return None if before is None else self._change(before, _after(before, event))

    def http_done(self, req: int, now: float, *, refused: bool) -> tuple[Book, Book] | None:
        """The HTTP exchange is over; `refused` when the engine answered an error, so that no task may ever have been made."""
        before = self._books.get(req)
        return None if before is None else self._change(before, replace(before, done_ts=now, refused=before.refused or refused))

    def close(self, req: int) -> Book | None:
        """Take a book away for another reason than its events."""
        book = self._books.pop(req, None)
        if book is not None:
            self.on_close(replace(book, whole=False))
        return book

    def overdue(self, now: float, after_s: float) -> list[Book]:
        """Books without a running task whose HTTP exchange ended `after_s` or longer ago."""
        return [b for b in self._books.values() if b.done_ts is not None and now - b.done_ts >= after_s]

    def not_after(self, now: float) -> None:
        """An exchange that ended after now has ended now: the clock was set back."""
        for book in self._books.values():
            if book.done_ts is not None and book.done_ts > now:
                self._books[book.req] = replace(book, done_ts=now)

    def of_pool(self, pool_id: int) -> list[Book]:
        """Open books that hold a pool."""
        return [b for b in self._books.values() if b.pool_id == pool_id]

    def _change(self, before: Book, after: Book) -> tuple[Book, Book]:
        if after.closed:
            del self._books[before.req]
            self.on_close(after)
        else:
            self._books[before.req] = after
        return before, after


def _after(book: Book, event: SlotEvent) -> Book:
    index = event.index
    if event.kind is SlotEventKind.LAUNCHED and index not in book.settled_tasks:
        return replace(book, open_tasks=book.open_tasks | {index})
    if event.kind is SlotEventKind.FIRST_TOKEN:
        return replace(book, active=True)
    if event.kind in _SETTLES:
        return replace(
            book,
            open_tasks=book.open_tasks - {index},
            settled_tasks=book.settled_tasks | {index},
            n_decoded=book.n_decoded + event.n_decoded,
            whole=book.whole and event.reason in _WHOLE,
        )
    return book
