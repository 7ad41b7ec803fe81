"""What the engine and the records say, kept for those who look: live state, speeds, savings, and the news of what changed.

Law: only listens. It is told of every happening in the turn in which it happens, waits for nothing, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from polykv_proxy.core.books import Book
from polykv_proxy.core.events import SlotEvent, SlotEventKind
from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.pools import Pool
from polykv_proxy.core.sessions import Session
from polykv_proxy.core.throughput import Throughput
from polykv_proxy.core.turn_tally import TurnTally
from polykv_proxy.core.turns import Turn, turn_of
from polykv_proxy.engine.wire import Counters, Hello, State
from polykv_proxy.ports import Clock
from polykv_proxy.runtime.live import Live
from polykv_proxy.runtime.news import News, Topic
from polykv_proxy.runtime.peers import Peers
from polykv_proxy.runtime.savings import SavingsBook


class Telemetry:
    """The listener of one runtime."""

    def __init__(self, ledger: Ledger, clock: Clock, savings: SavingsBook) -> None:
        self.savings = savings
        self.news = News(clock, ledger.first_number)
        self.peers = Peers(self.news, clock)
        self.live = Live()
        self.throughput = Throughput()
        self.turns = TurnTally()
        self.n_gaps = 0
        self._ledger = ledger
        self._clock = clock
        ledger.tree.listeners.append(self._pool_changed)
        ledger.sessions.listeners.append(self._session_changed)

    # -- the engine ---------------------------------------------------------------------------------------------------

    def engine_ready(self, hello: Hello, state: State) -> None:
        """It was greeted, and its state read."""
        self.live.saw(state)
        self.peers.engine_says(state.gpu_share)
        self.throughput.boot(hello.boot_id)
        self.savings.boot(hello.boot_id)
        self.news.publish(Topic.ENGINE, "linked", boot_id=hello.boot_id, reason=None)

    def engine_away(self, kind: str, reason: str) -> None:
        """`lost`: nobody answers. `absent`: it has no pools."""
        self.live.lost()
        self.news.publish(Topic.ENGINE, kind, boot_id=self._ledger.facts.boot_id if self._ledger.facts else None, reason=reason)

    def engine_state(self, kind: str, reason: str | None) -> None:
        """The process came into another state."""
        self.news.publish(Topic.ENGINE, kind, boot_id=None, reason=reason)

    def counted(self, counters: Counters) -> None:
        """Counters came."""
        self.live.counted(counters)
        self.throughput.counted(counters.value(), self._clock.monotonic())

    def missed(self) -> None:
        """Events did not reach us; the state is read in their place."""
        self.n_gaps += 1
        self.savings.missed()

    def saw(self, event: SlotEvent) -> None:
        """A slot event came; its book is still open."""
        book = self._ledger.books.get(event.req)
        turn = turn_of(event, book.held_s if book else 0.0)
        self.throughput.saw(event, turn, self._clock.monotonic())
        saved_s = self.savings.note(event, book)
        if not event.fill:
            self._count(event, book, turn, saved_s)
            self.news.publish(Topic.REQUEST, event.kind.value, **self._request(event, book, turn))

    def _count(self, event: SlotEvent, book: Book | None, turn: Turn, saved_s: float) -> None:
        if event.kind is SlotEventKind.RELEASED:
            self.turns.released(event, turn, book, saved_s)
        elif event.kind is SlotEventKind.DROPPED:
            self.turns.dropped()

    def _request(self, event: SlotEvent, book: Book | None, turn: Turn) -> Mapping[str, object]:
        session = self._ledger.sessions.by_number(event.session)
        return {
            "req": event.req or None,
            "request_id": book.request_id if book else None,
            "index": event.index,
            "pool_id": book.pool_id if book else None,
            "session_id": session.session_id if session else None,
            "slot": event.slot if event.slot >= 0 else None,
            "n_prompt": event.n_prompt,
            "n_cached": event.n_cached,
            "n_shared": event.n_shared,
            "n_decoded": event.n_decoded,
            "miss": event.miss or (book.miss if book else None),
            "reason": event.reason,
            "queue_ms": millis(turn.queue_s),
            "ttft_ms": millis(turn.ttft_s),
            "tpot_ms": millis(turn.tpot_s),
            "prompt_tps": turn.prompt_tps,
            "tps": turn.tps,
        }

    # -- the records --------------------------------------------------------------------------------------------------

    def _pool_changed(self, before: Pool | None, after: Pool | None) -> None:
        """1. Made, or released for good; 2. its KV came or went; 3. its pin did. What it is used for is told by requests."""
        if before is None and after is not None:
            self._tell_pool("created", after)
        elif after is None and before is not None:
            self.savings.forget(before.pool_id)
            self._tell_pool("released", before)
        elif before is not None and after is not None:
            if before.residency is not after.residency:
                self._tell_pool(after.residency.value, after)
            if before.pin != after.pin:
                self._tell_pool("pinned" if after.pin else "unpinned", after)

    def _tell_pool(self, kind: str, pool: Pool) -> None:
        self.news.publish(
            Topic.POOL,
            kind,
            pool_id=pool.pool_id,
            name=pool.name,
            parent=pool.parent,
            prefix_len=pool.prefix_len,
            residency=pool.residency.value,
            reason=pool.reason,
        )

    def _session_changed(self, before: Session | None, after: Session | None) -> None:
        """1. Opened, or ended; 2. it belongs to another pool; 3. it works, or rests."""
        if after is None and before is not None:
            self.throughput.forget(before.number)
            self._tell_session("ended", before)
        elif after is not None:
            if before is None:
                self._tell_session("opened", after)
            elif before.pool_id != after.pool_id:
                self._tell_session("attached" if after.pool_id is not None else "detached", after)
            if before is not None and before.state != after.state:
                self._tell_session(after.state, after)

    def _tell_session(self, kind: str, session: Session) -> None:
        self.news.publish(Topic.SESSION, kind, session_id=session.session_id, pool_id=session.pool_id, n_streams=session.n_streams)


def millis(seconds: float | None) -> float | None:
    """Milliseconds, to the microsecond."""
    return None if seconds is None else round(seconds * 1e3, 3)
