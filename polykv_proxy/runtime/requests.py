"""Requests that named a pool or a session: from the wish to the headers that go to the engine.

Law: once admitted, the book of a request is open before anything is awaited and closes by the engine's events; whatever goes
wrong with a pool on the way, the request is served without it and told why.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from polykv_proxy.core.admission.line import Ask
from polykv_proxy.core.admission.unnamed import Prompt
from polykv_proxy.core.admission.verdict import Outcome, Verdict
from polykv_proxy.core.attach import Attachment, Course, Miss, Wish, check_explicit_prefix, decide_attach
from polykv_proxy.core.books import Brought
from polykv_proxy.core.pools import Pool
from polykv_proxy.core.prefix import NO_TOKENS, Tokens, common_prefix
from polykv_proxy.core.sessions import Session
from polykv_proxy.errors import ApiError, EngineError
from polykv_proxy.ports import Header
from polykv_proxy.runtime.admission import Admission, OnHeld, unheard
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.pools import PoolService
from polykv_proxy.runtime.seldom import Seldom

log = logging.getLogger("polykv.requests")

DryRun = Callable[[], Awaitable[list[Tokens]]]


@dataclass(frozen=True, slots=True)
class Booked:
    """A request that may go to the engine."""

    req: int
    attachment: Attachment
    session: Session | None
    brought: Brought | None = None
    verdict: Verdict | None = None


class RequestDesk:
    """Books requests and closes their HTTP side."""

    def __init__(self, hub: Hub, pools: PoolService, admission: Admission) -> None:
        self._hub = hub
        self._pools = pools
        self._admission = admission
        self._seldom = Seldom(log, hub.clock.monotonic)

    async def book(self, wish: Wish, dry_run: DryRun, held: OnHeld = unheard) -> Booked:
        """Admit, decide, wait for the pool where that helps, check an explicit P.

        ApiError refuses; cancelled when the client leaves. `held`: told of the policy that makes it wait.
        """
        ledger = self._hub.ledger
        begun = self._hub.clock.monotonic()
        req = ledger.take_req()
        verdict = None if self._admission.off else await self._enter(req, wish, dry_run, held)
        try:
            attachment, session = ledger.admit(req, wish, self._hub.clock.wall())
        except ApiError:
            self._admission.over(req)
            raise
        if attachment.pool is not None and attachment.pool.seq is not None:
            self._pools.maker.room.expendables.taken(attachment.pool.seq)
        try:
            attachment = await self._settle(req, attachment, wish)
            if wish.explicit_p is not None and attachment.course is Course.ATTACH and attachment.pool is not None:
                await self._check(attachment.pool, wish.explicit_p, dry_run)
        except BaseException:
            self._hub.post(ledger.abandon(req, self._hub.clock.wall()))
            raise
        ledger.books.sent(req, self._hub.clock.monotonic() - begun, attachment.miss.value if attachment.miss else None)
        book = ledger.books.get(req)
        brought = book.brought if book and attachment.course is Course.ATTACH else None
        return Booked(req, attachment, session, brought, verdict)

    async def enter_plain(self) -> tuple[int, Verdict]:
        """Admit a request that has no book: by bounds of the whole server alone. Its number; `Admission.over` ends it."""
        req = self._hub.ledger.take_req()
        return req, await self._admission.enter(Ask(req, unruled=True))

    async def _enter(self, req: int, wish: Wish, dry_run: DryRun, held: OnHeld) -> Verdict:
        """Ask for admission. A pool that is not there, or takes nobody, is said before anybody waits for it."""
        pool = decide_attach(self._hub.ledger.tree, wish).pool
        pool_id, n_prefix, n_prompt, continues = None if pool is None else pool.pool_id, 0, 0, False
        if self._admission.rules(pool_id, wish.session_id):
            prompts = await self._read(dry_run)
            longest = max(prompts, key=len, default=NO_TOKENS)
            n_prefix = 0 if pool is None else common_prefix(pool.tokens, longest)
            n_prompt = len(longest) - n_prefix
            if pool is not None and wish.session_id is None and len(prompts) == 1:
                continues = self._admission.continues(req, Prompt(pool.pool_id, n_prefix, longest))
        ask = Ask(
            req,
            pool_id,
            wish.session_id,
            n_prefix,
            n_prompt,
            wish.max_tokens,
            wish.n_tasks,
            overcommit=wish.overcommit,
            continues=continues,
            request_id=wish.request_id,
        )
        try:
            return await self._admission.enter(ask, held)
        except ApiError:
            self._admission.over(req)
            raise

    @staticmethod
    async def _read(dry_run: DryRun) -> list[Tokens]:
        """Its prompts as tokens. None where the engine refuses it: the engine itself will answer for that."""
        try:
            return await dry_run()
        except EngineError as error:
            log.info("no dry run for admission, the engine answers for itself: %s", error)
            return []

    async def _settle(self, req: int, attachment: Attachment, wish: Wish) -> Attachment:
        if attachment.course not in {Course.WAIT, Course.REBUILD} or attachment.pool is None:
            return attachment
        pool_id = attachment.pool.pool_id
        begins = self._pools.flight(pool_id) is None
        came = await self._bring(pool_id)
        if begins and isinstance(came, Brought):  # those that wait for the same work save what it computes
            self._hub.ledger.books.mark_brought(req, came)
        try:
            again = decide_attach(self._hub.ledger.tree, wish)
        except ApiError:
            again = attachment
        if again.course is Course.ATTACH and again.pool is not None and again.pool.pool_id == pool_id:
            return again
        return Attachment(Course.UNSHARED, attachment.pool, miss=came if isinstance(came, Miss) else Miss.REBUILD_FAILED)

    async def _bring(self, pool_id: int) -> Brought | Miss:
        """Wait until the pool is there: how it came. The reason when it cannot be."""
        try:
            made = await self._pools.bring(pool_id)
        except ApiError as error:
            kind = error.code if error.passing else (error.code, pool_id)
            self._seldom.warning(kind, f"pool {pool_id}: served without it: {error}")
            return Miss.NO_SEQ_IDS if error.code == "pool_seqs_exhausted" else Miss.REBUILD_FAILED
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Miss.REBUILD_FAILED
        return Brought.RESTORED if made.restored else Brought.REBUILT

    async def _check(self, pool: Pool, wanted: int, dry_run: DryRun) -> None:
        try:
            prompts = await dry_run()
        except EngineError as error:
            log.info("no dry run for an explicit prefix length, the engine answers for itself: %s", error)
            return
        for prompt in prompts:
            check_explicit_prefix(pool, wanted, prompt)

    def engine_headers(self, booked: Booked) -> list[Header]:
        """What the relay adds to the request."""
        attachment = booked.attachment
        headers = [(b"x-polykv-key", self._hub.client.key.encode()), (b"x-polykv-req", str(booked.req).encode())]
        if attachment.course is Course.ATTACH:
            headers.append((b"x-polykv-seq", str(attachment.seq).encode()))
            headers.append((b"x-polykv-shared", str(attachment.max_shared).encode()))
        if booked.session is not None:
            headers.append((b"x-polykv-session", str(booked.session.number).encode()))
        echo = _echo(booked)
        if echo:
            headers.append((b"x-polykv-echo", json.dumps(echo, separators=(",", ":")).encode()))
        return headers

    def reply_headers(self, booked: Booked, wish: Wish, headers: Sequence[Header]) -> list[Header]:
        """What the client sees added: the pool, how much was really shared, the session, and its pace or that of the request."""
        added: list[Header] = []
        pool, verdict = booked.attachment.pool, booked.verdict
        if verdict is not None and verdict.sessions_remaining is not None:
            added.append((b"x-sessions-remaining", str(verdict.sessions_remaining).encode()))
        if pool is not None:
            added.append((b"x-pool-id", str(pool.pool_id).encode()))
        if pool is not None or booked.attachment.course is Course.UNSHARED:
            added.append((b"x-cached-prefix-tokens", str(_number(headers, b"x-polykv-shared") or 0).encode()))
        if wish.session_id is not None:
            added.append((b"x-session-id", wish.session_id.encode("ascii")))
        owner = self._owner(booked, wish, headers)
        tps = None if owner is None else self._hub.telemetry.throughput.tps(owner, self._hub.clock.monotonic())
        if tps is not None:
            added.append((b"x-session-tps", f"{tps:.2f}".encode()))
        return added

    def _owner(self, booked: Booked, wish: Wish, headers: Sequence[Header]) -> int | None:
        """Whose pace it is: 1. the session's; 2. without one that of the request, once its slot is known to have worked for it."""
        if wish.session_id is not None:
            session = self._hub.ledger.sessions.get(wish.session_id)
            return None if session is None else session.number
        slot = _number(headers, b"x-polykv-slot")
        owner = None if slot is None else self._hub.telemetry.throughput.slot_owner(slot)
        speed = None if owner is None else self._hub.telemetry.throughput.speed(owner)
        return owner if speed is not None and speed.turn is not None and speed.turn.req == booked.req else None

    def http_done(self, booked: Booked, *, refused: bool) -> None:
        """The HTTP exchange is over; `refused`: the engine answered an error."""
        self._hub.post(self._hub.ledger.http_done(booked.req, self._hub.clock.wall(), refused=refused))


def _echo(booked: Booked) -> dict[str, object]:
    echo: dict[str, object] = {}
    if booked.attachment.pool is not None:
        echo["pool_id"] = booked.attachment.pool.pool_id
    if booked.session is not None:
        echo["session_id"] = booked.session.session_id
    if booked.brought is not None:
        echo[booked.brought.value] = True
    if booked.attachment.miss is not None:
        echo["miss"] = booked.attachment.miss.value
    verdict = booked.verdict
    if verdict is not None and verdict.scope is not None:
        echo["headroom_sessions"] = verdict.headroom_sessions
        echo["backpressure"] = _backpressure(verdict)
    return echo


def _backpressure(verdict: Verdict) -> str:
    """`warned`: let in although there was no room; `held`: it had to wait; `none`."""
    if verdict.outcome is Outcome.WARNED:
        return "warned"
    return "held" if verdict.waited_s > 0 else "none"


def _number(headers: Sequence[Header], wanted: bytes) -> int | None:
    for name, value in headers:
        if name.lower() == wanted and value.isdigit():
            return int(value)
    return None
