"""Admission at work: the gate of core/admission, told of everything that happens, and those who wait for it.

Law: decides nothing; the gate does. Whoever asks is answered once. What was reserved for a request goes back when its book is
closed, or, where it has none, when `over` is called. Without any policy and bound nobody is asked anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from polykv_proxy.core.admission.capacity import Capacity, capacity
from polykv_proxy.core.admission.gate import Gate, Limits
from polykv_proxy.core.admission.line import Ask
from polykv_proxy.core.admission.load import Load
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Policy, Ruling
from polykv_proxy.core.admission.unnamed import Prompt, Unnamed
from polykv_proxy.core.admission.verdict import Arm, Outcome, Verdict
from polykv_proxy.core.books import Book
from polykv_proxy.core.events import SlotEvent
from polykv_proxy.core.pools import Pool
from polykv_proxy.core.sessions import Session
from polykv_proxy.engine.wire import State
from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.load import load_of
from polykv_proxy.runtime.news import Topic
from polykv_proxy.runtime.policies_book import Entry, PoliciesBook

log = logging.getLogger("polykv.admission")


DOUBT_S = 0.25
"""A broken connection is known at once, that the engine has died a little later."""

OnHeld = Callable[[Policy], None]


def unheard(_: Policy) -> None:
    """For callers who do not care."""


class Admission:
    """The admission of one runtime."""

    def __init__(self, hub: Hub, limits: Limits) -> None:
        self._hub = hub
        self._book = PoliciesBook(hub.journal)
        self.gate = Gate(limits, self._parent_of)
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._doubted_until = 0.0
        self._boot_id = ""
        self._unnamed = Unnamed()
        self._declared: set[int] = set()
        """Scopes whose policy is the pools file's."""
        hub.ledger.books.on_close = self._closed
        hub.ledger.sessions.listeners.append(self._session_changed)
        hub.ledger.tree.listeners.append(self._pool_changed)
        hub.on_heard = self._heard

    async def load(self) -> None:
        """Policies of earlier runs."""
        for scope, entry in (await self._book.read()).items():
            if scope == DEFAULT_SCOPE or self._hub.ledger.tree.get(scope) is not None:
                self._put(scope, entry)

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def off(self) -> bool:
        """Is there no policy and no bound at all?"""
        return self.gate.off

    @property
    def bounded(self) -> bool:
        """Is the number of running requests bounded, whatever they are?"""
        return self.gate.limits.max_running is not None

    @property
    def _resting(self) -> bool:
        """Is there nobody to ask, and nobody who was asked before the last policy went?"""
        return self.off and not self._waiting and not len(self.gate.outlook.reservations)

    def rules(self, pool_id: int | None, session_id: str | None) -> bool:
        """Would a policy be asked about this request?"""
        return not self.gate.outlook.attached.known(session_id) and self.gate.outlook.policies.ruling(pool_id) is not None

    def continues(self, req: int, prompt: Prompt) -> bool:
        """Is this prompt, of a request without a session id, the next turn of a conversation whose tokens a slot still holds?"""
        state = self._hub.telemetry.live.state
        idle = {slot.slot for slot in state.slots if slot.state == "idle" and slot.n_tokens} if state is not None else set()
        known = self._unnamed.continues(prompt, idle)
        self._unnamed.asked(req, prompt)
        return known

    async def enter(self, ask: Ask, held: OnHeld = unheard) -> Verdict:
        """The verdict, as soon as there is one: let in, with what it takes reserved, or what never fits. ApiError 429 otherwise.

        `held`: called when it has to wait by a policy.
        """
        verdict = self.gate.ask(ask, self._load() or Load(), self._now())
        self._tell(ask, verdict)
        if verdict.outcome is Outcome.HELD:
            ruling = self.ruling(ask.pool_id)
            if ruling is not None:
                held(ruling.policy)
            verdict = await self._held(ask)
            self._tell(ask, verdict)
        if verdict.outcome.admits or verdict.outcome is Outcome.NEVER_FITS:
            return verdict
        raise refusal(verdict)

    def over(self, req: int) -> None:
        """A request without a book is over, or never got one. Idempotent."""
        self._unnamed.closed(req)
        self.gate.closed(req, self._now())
        self.wake()

    async def _held(self, ask: Ask) -> Verdict:
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting[ask.req] = future
        if self._draining:
            future.set_exception(_draining())
        self._set_timer()
        try:
            return await future
        except BaseException:
            self._waiting.pop(ask.req, None)
            self._unnamed.closed(ask.req)
            gone = self.gate.closed(ask.req, self._now())
            if gone is not None:
                self._tell(ask, gone)
            self.wake()
            raise

    def wake(self) -> None:
        """Something has changed: whose waiting is over?"""
        if self._resting:
            return
        if self._hub.boot_id != self._boot_id:
            self._boot_id = self._hub.boot_id
            self.gate.engine_changed()
            self._unnamed.forget()
        for verdict in self.gate.wake(None if self._doubted else self._load(), self._now()):
            future = self._waiting.pop(verdict.req, None)
            if future is not None and not future.done():
                future.set_result(verdict)
            else:
                self.gate.closed(verdict.req, self._now())
        self._set_timer()

    def drain(self) -> None:
        """The proxy is being stopped: who waits has not begun, and is not waited for."""
        self._draining = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_draining())

    def doubt(self) -> None:
        """A connection to the engine broke: until it is known whether the engine is gone, nobody who waits is sent after it."""
        if not self._resting:
            self._doubted_until = self._now() + DOUBT_S
            self._set_timer()

    @property
    def _doubted(self) -> bool:
        return self._now() < self._doubted_until

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.gate.next_wake(self._now())
        if at is not None:
            at = min(at, self._doubted_until) if self._doubted else at
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - self._now()), self.wake)

    # -- policies -----------------------------------------------------------------------------------------------------

    def ruling(self, pool_id: int | None) -> Ruling | None:
        """What holds there, of its own or from above."""
        return self.gate.outlook.policies.ruling(pool_id)

    def own(self, scope: int) -> Policy | None:
        """What was set there."""
        return self.gate.outlook.policies.own(scope)

    async def set_policy(self, scope: int, policy: Policy, *, declared: bool = False) -> None:
        """Written down, then in force. JournalError: nothing has changed."""
        entry = Entry(policy, declared)
        await self._book.put(scope, entry)
        if scope == DEFAULT_SCOPE or self._hub.ledger.tree.get(scope) is not None:
            self._put(scope, entry)
            self._say("set", scope, policy)
            self.wake()

    async def declare(self, scope: int, policy: Policy | None) -> None:
        """What the pools file says. 1. A policy: it holds; 2. none: one that the file had set goes, any other stays."""
        if policy is not None and (self.own(scope) != policy or scope not in self._declared):
            await self.set_policy(scope, policy, declared=True)
        elif policy is None and scope in self._declared:
            await self.drop_policy(scope)

    async def pass_on(self, before: int, after: int) -> None:
        """A pool takes the place of another, its policy included."""
        policy = self.own(before)
        if policy is not None:
            await self.set_policy(after, policy, declared=before in self._declared)

    def _put(self, scope: int, entry: Entry) -> None:
        self.gate.set_policy(scope, entry.policy)
        (self._declared.add if entry.declared else self._declared.discard)(scope)

    async def drop_policy(self, scope: int) -> Policy | None:
        """The one that was removed; None when there was none. Those who wait for it are let in."""
        await self._book.drop(scope)
        self._declared.discard(scope)
        dropped = self.gate.drop_policy(scope)
        if dropped is not None:
            self._say("removed", scope, dropped)
        self.wake()
        return dropped

    def _say(self, what: str, scope: int, policy: Policy) -> None:
        pool = self._hub.ledger.tree.get(scope)
        pool_id, name = (scope, pool.name) if pool is not None else (None, None)
        self._hub.telemetry.news.publish(Topic.POLICY, what, pool_id=pool_id, name=name, policy=policy.as_object())

    def capacity(
        self,
        pool: Pool | None,
        state: State,
        pressure: float,
        *,
        expected_tokens: int | None = None,
        session_id: str | None = None,
    ) -> Capacity:
        """The report on a pool, or on requests without one, as of this state of the engine."""
        return capacity(
            self.gate,
            load_of(self._hub, state) or Load(),
            self._now(),
            None if pool is None else pool.pool_id,
            n_prefix=0 if pool is None else pool.prefix_len,
            expected_tokens=expected_tokens,
            session=session_id,
            compaction_pressure=pressure,
        )

    def counts(self) -> list[Mapping[str, object]]:
        """How many requests ended by which arm and how, how many were held by it, and what advisory policies would have done."""
        decided = self.gate.decisions
        ends = [{"arm": arm.value, "outcome": outcome.value, "n": n} for (arm, outcome), n in sorted(decided.ends.items())]
        held = [{"arm": arm.value, "outcome": Outcome.HELD.value, "n": n} for arm, n in sorted(decided.holds.items())]
        would = [{"arm": arm.value, "would": outcome.value, "n": n} for (arm, outcome), n in sorted(decided.would.items())]
        return [*ends, *held, *would]

    def lines(self) -> list[Mapping[str, object]]:
        """Those who wait, by line and turn."""
        now, positions = self._now(), self.gate.lines.positions()
        return [
            {
                "req": waiting.ask.req,
                "session_id": waiting.ask.session,
                "pool_id": waiting.ask.pool_id,
                "arm": waiting.finding.arm.value,
                "reason": waiting.finding.reason.value,
                "position": positions[waiting.ask.req],
                "waited_ms": round((now - waiting.since) * 1000),
                "deadline_ms": round((waiting.deadline - now) * 1000),
            }
            for waiting in self.gate.lines
        ]

    # -- within -------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._hub.clock.monotonic()

    def _load(self) -> Load | None:
        return load_of(self._hub, self._hub.telemetry.live.state)

    def _parent_of(self, pool_id: int) -> int | None:
        pool = self._hub.ledger.tree.get(pool_id)
        return None if pool is None else pool.parent

    def _heard(self, event: SlotEvent | None) -> None:
        if event is not None and not self.off:
            self._unnamed.saw(event)
        self.wake()

    def _closed(self, book: Book) -> None:
        if self._resting:
            return
        self._unnamed.closed(book.req)
        self.gate.closed(book.req, self._now(), book.n_decoded if book.whole and book.n_decoded else None)
        self.wake()

    def _session_changed(self, before: Session | None, after: Session | None) -> None:
        if after is None and before is not None:
            self.gate.session_ended(before.session_id, self._now())
        elif after is not None and (before is None or before.pool_id != after.pool_id):
            self.gate.session_attached(after.session_id, after.pool_id)

    def _pool_changed(self, before: Pool | None, after: Pool | None) -> None:
        if after is None and before is not None:
            if self.gate.outlook.policies.own(before.pool_id) is not None:
                self._hub.spawn(self._book.drop(before.pool_id))
            self._declared.discard(before.pool_id)
            self.gate.pool_gone(before.pool_id)

    def _tell(self, ask: Ask, verdict: Verdict) -> None:
        """One line in the log and one event for each decision by a policy or bound; others are no news."""
        found = verdict.finding
        if found.arm in {Arm.NO_POLICY, Arm.CONTINUATION}:
            return
        log.log(
            logging.DEBUG if verdict.outcome is Outcome.ADMITTED and found.arm is Arm.NONE else logging.INFO,
            "request %d session=%s pool=%s %s arm=%s value=%s threshold=%s waited=%.3f s: %s",
            verdict.req,
            ask.session,
            verdict.pool_id,
            verdict.outcome,
            found.arm,
            found.value,
            found.threshold,
            verdict.waited_s,
            found.reason,
            extra={"fields": {"request_id": ask.request_id}},  # perhaps told in the turn of another request
        )
        facts = decision_facts(verdict, ask.session)
        self._hub.telemetry.news.publish(Topic.DECISION, verdict.outcome.value, **facts, request_id=ask.request_id)


def _draining() -> ApiError:
    message = "The proxy is shutting down; this request still waited to be admitted."
    return ApiError("draining", message, retry_after_s=5)


def decision_facts(verdict: Verdict, session: str | None) -> dict[str, object]:
    """One decision, JSON-ready."""
    return {
        "req": verdict.req,
        "session_id": session,
        "pool_id": verdict.pool_id,
        **verdict.finding_facts(),
        "would": verdict.would.value if verdict.would else None,
        "waited_ms": round(verdict.waited_s * 1000),
        "position": verdict.position,
        "expected_wait_ms": None if verdict.expected_wait_s is None else round(verdict.expected_wait_s * 1000),
    }


_MORE = {
    Outcome.QUEUE_FULL: "the queue is full",
    Outcome.TIMED_OUT: "it waited for {waited:.1f} s",
    Outcome.REJECTED: "no room for one session more",
}


def refusal(verdict: Verdict) -> ApiError:
    """429: which arm, its value and threshold, and when to come again."""
    found = verdict.finding
    against = "" if found.value is None or found.threshold is None else f" ({found.value:.6g} against {found.threshold:.6g})"
    more = _MORE[verdict.outcome].format(waited=verdict.waited_s)
    headers = [] if verdict.should_retry else [(b"x-should-retry", b"false")]
    return ApiError(
        "saturated",
        f"{found.reason}{against}: {more}; try again in {verdict.retry_after_s} s",
        retry_after_s=verdict.retry_after_s,
        extra=verdict.error_extra(),
        more_headers=headers,
    )
