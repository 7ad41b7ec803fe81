"""Pools as callers see them: create, fork, rebuild.

Law: a pool is known to nobody before the engine says `done`, except as `materializing` under an id that is never used again. What
the journal could not take did not happen. One flight per pool: whoever needs it waits for the same work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from polykv_proxy.core.boots import Boots
from polykv_proxy.core.ledger import Placement
from polykv_proxy.core.lifetime import Lifetime
from polykv_proxy.core.pools import Pool, PoolTree, Residency, with_tokens
from polykv_proxy.core.prefix import Tokens, as_tokens, hash_prefix
from polykv_proxy.core.tally import Rebuilt
from polykv_proxy.core.unmade import Unmade
from polykv_proxy.engine import wire
from polykv_proxy.errors import ApiError, EngineError, EngineRefusedError, EngineUnavailableError, JournalError
from polykv_proxy.runtime.answers import api_error
from polykv_proxy.runtime.builder import Builder
from polykv_proxy.runtime.drafts import Drafts
from polykv_proxy.runtime.flight import Flight
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.idempotency import IdempotencyDesk, Ticket
from polykv_proxy.runtime.journal import Reply
from polykv_proxy.runtime.names import Names
from polykv_proxy.runtime.orders import Made, PoolFlight, PoolSpec, Step
from polykv_proxy.runtime.prefixes import check_tokens
from polykv_proxy.runtime.turns import LAST_TURN, LastTurns
from polykv_proxy.runtime.vault import Vault

log = logging.getLogger("polykv.pools")


Show: TypeAlias = Callable[[Pool, wire.State | None], Mapping[str, object]]


class PoolService:
    """Makes and rebuilds pools. `show` renders a pool for a reply, with what the engine's state says of it."""

    def __init__(self, hub: Hub, vault: Vault, show: Show, replies: tuple[Reply, ...] = ()) -> None:
        self._hub = hub
        self._show = show
        self._flights: dict[int, PoolFlight] = {}
        self._builder = Builder(hub, vault, self.bring)
        self._unmade = Unmade(hub.ledger)
        self._names = Names(hub.ledger, self._release_unwanted)
        self.maker = self._builder.maker
        self.drafts = Drafts(hub, self.find, self.flight)
        self.turns = LastTurns(hub.client)
        self.on_unwanted: Callable[[int], Coroutine[Any, Any, object]]
        self.desk: IdempotencyDesk[Made, Step] = IdempotencyDesk(replies)

    @property
    def _tree(self) -> PoolTree:
        return self._hub.ledger.tree

    def find(self, key: str | int) -> Pool:
        """A pool by id, digits or name. ApiError 404."""
        pool = self._tree.find(key)
        if pool is None:
            raise ApiError("pool_not_found", f"there is no pool {key!r}; GET /polykv/pools lists those there are", param="pool_id")
        return pool

    @property
    def busy(self) -> bool:
        """Is any pool being made?"""
        return any(not flight.done for flight in self._flights.values())

    def flight(self, pool_id: int) -> PoolFlight | None:
        """The work in progress on a pool."""
        flight = self._flights.get(pool_id)
        return None if flight is None or flight.done else flight

    # -- create ---------------------------------------------------------------------------------------------------------

    def create(self, spec: PoolSpec, ticket: Ticket | None = None, *, keep: bool = False) -> PoolFlight:
        """Begin to make a pool, or join the work of the same ticket. With a name or a ticket the work goes on without waiters."""
        keep = keep or spec.name is not None or ticket is not None
        self._hub.on_wanted()

        def begin() -> PoolFlight:
            return Flight(lambda flight: self._create(spec, ticket, flight), keep=keep)

        return begin() if ticket is None else self.desk.join(ticket, begin)

    async def _create(self, spec: PoolSpec, ticket: Ticket | None, flight: PoolFlight) -> Made:
        hello = self._hub.require_engine()
        if hello.prefix_sharing == "none" or hello.max_pools == 0:
            why = hello.prefix_sharing_why or "the engine was started without pool ids"
            raise ApiError("pools_unsupported", f"this engine cannot hold pools: {why}")
        try:
            tokens = await self.drafts.tokens_of(spec)
            await self._names.vacate(spec.name)
            spec = await self.drafts.branched(spec, tokens)
            existing = self._names.holder(spec.name, tokens)
            if existing is not None:
                return await self._again(existing, ticket)
            return await self._make(self._enter(spec, tokens, hello), spec, ticket, flight)
        except (EngineError, JournalError) as error:
            raise self._answer(error) from error

    async def _again(self, pool: Pool, ticket: Ticket | None) -> Made:
        await self.bring(pool.pool_id)
        state = await self._hub.state()
        made = self._made(self.find(pool.pool_id), 200, state)
        if ticket is not None:
            await self._save(self.find(pool.pool_id), made, ticket)
        return made

    def _enter(self, spec: PoolSpec, tokens: Tokens | None, hello: wire.Hello) -> Pool:
        self._unmade.make_room()
        now = self._hub.clock.wall()
        prefix = tokens if tokens is not None else as_tokens([])
        pool = Pool(
            pool_id=self._tree.take_id(),
            tokens=prefix,
            hashed=hash_prefix(prefix),
            residency=Residency.MATERIALIZING,
            fingerprint=hello.model.fingerprint,
            created_ts=now,
            last_access_ts=now,
            name=spec.name if tokens is not None else None,
            parent=spec.parent,
            branch_pos=spec.branch_pos or 0 if tokens is not None else 0,
            source=spec.source,
            ttl_s=spec.ttl_s,
        )
        self._hub.ledger.begin_pool(pool)
        return pool

    async def _make(self, pool: Pool, spec: PoolSpec, ticket: Ticket | None, flight: PoolFlight) -> Made:
        pool_id = pool.pool_id
        self._flights[pool_id] = flight
        failure: ApiError | None = None
        try:
            await self._hub.journal.reserve_pool_id(pool_id)
            if spec.from_session is None:
                flight.report(Step(pool_id))
                made, at = await self._builder.compute(pool, flight, spec)
            else:
                made, at = await self._of_session(pool, spec, flight)
            return await self._uncancelled(self._land(pool_id, made, at, spec, ticket))
        except (ApiError, EngineError, JournalError) as error:
            failure = self._answer(error)
            if flight.kept_open:
                log.warning("pool %d was promised and could not be made: %s", pool_id, failure)
            raise
        finally:
            self._flights.pop(pool_id, None)
            after = self._tree.get(pool_id)
            if after is not None and after.residency is Residency.MATERIALIZING:
                reason = str(failure) if failure is not None and flight.kept_open else None
                self._discard(pool_id, reason, lasting=failure is None or not failure.passing)

    async def _of_session(self, pool: Pool, spec: PoolSpec, flight: PoolFlight) -> tuple[wire.Made, Placement]:
        """What a session holds; where that is gone, and the order says so, the prompt of its last turn, computed again.

        The pool is announced when its tokens are known: until then whatever fails is answered as if nothing had been begun.
        """
        assert spec.from_session is not None
        try:
            return await self._builder.snapshot(pool.pool_id, spec, flight)
        except (ApiError, EngineRefusedError) as error:
            if not self.turns.can_stand_in(spec.from_session, error):
                raise
            if not spec.rebuild:
                raise self.turns.gone(spec.from_session) from error
        tokens = await self.turns.prompt_of(spec.from_session, spec.n_tokens)
        check_tokens(tokens, self._hub.require_engine(), spec.source)
        branch_pos = await self.drafts.branch_of(spec, tokens)
        nearest = self.drafts.nearest(tokens)
        name = spec.name if self._names.holder(spec.name, tokens) is None else None
        draft = replace(with_tokens(pool, tokens), branch_pos=branch_pos, name=name, source=LAST_TURN)
        if self._tree.get(pool.pool_id) is not None:
            self._tree.put(draft)
        flight.report(Step(pool.pool_id))
        made, at = await self._builder.compute(draft, flight, nearest)
        return made.model_copy(update={"tokens": tokens.tolist()}), at

    async def sweep(self) -> None:
        """Give back what a cancelled or failed call may have left: its `done` can cross our leaving."""
        hub = self._hub
        if hub.clock.monotonic() >= hub.suspect_until or not hub.linked or self._flights:
            return
        state = await hub.client.state()
        if not self._flights:
            hub.post(Boots(hub.ledger).strays(state.snapshot()))

    async def _land(self, pool_id: int, made: wire.Made, at: Placement, spec: PoolSpec, ticket: Ticket | None) -> Made:
        """From `done` to a pool that survives: believe the record, write it down, or give everything back."""
        ledger = self._hub.ledger
        state = await self._hub.state()
        tokens = as_tokens(made.tokens) if made.tokens is not None else None
        try:
            pool = await self._known_snapshot(pool_id, tokens, spec) if spec.from_session is not None else self._tree.get(pool_id)
        except ApiError:
            await self.maker.give_back(at.seq, at.boot_id)
            raise
        if pool is not None and pool.pool_id != pool_id:
            await self.maker.give_back(at.seq, at.boot_id)
            return await self._again(pool, ticket)
        commands = ledger.place(pool_id, at, tokens)
        placed = self._tree.get(pool_id)
        if placed is None or placed.residency is not Residency.RESIDENT:
            await self._hub.run(commands)
            if placed is not None and placed.residency is Residency.LOST:
                self._discard(pool_id)
            raise EngineUnavailableError("the pool was released or the engine went away while it was being made")
        answer = self._made(placed, 201, state)
        try:
            await self._save(placed, answer, ticket)
        except JournalError:
            self._discard(pool_id)
            await self.maker.give_back(at.seq, at.boot_id)
            raise
        return answer

    async def _known_snapshot(self, pool_id: int, tokens: Tokens | None, spec: PoolSpec) -> Pool | None:
        """A snapshot gets its name and its branch when its tokens are known; a pool of that name and prefix is the answer then."""
        if tokens is None:
            raise ApiError("engine_protocol", "the engine sent a snapshot without its tokens")
        branch_pos = await self.drafts.branch_of(spec, tokens)
        existing = self._names.holder(spec.name, tokens)
        pool = self._tree.get(pool_id)
        if existing is None and pool is not None:
            self._tree.put(replace(pool, name=spec.name, branch_pos=branch_pos))
        return existing or pool

    async def _save(self, pool: Pool, made: Made, ticket: Ticket | None) -> None:
        reply = None
        if ticket is not None:
            reply = Reply(ticket.key, ticket.body_hash, made.status, made.reply, self._hub.clock.wall())
        await self._hub.journal.save_pool(pool, self._hub.ledger.placement(pool.pool_id), reply)
        if reply is not None:
            self.desk.remember(reply)

    async def _uncancelled(self, landing: Coroutine[Any, Any, Made]) -> Made:
        """Let a landing end although nobody waits any more; a pool that nobody then knows of is released."""
        task = asyncio.ensure_future(landing)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                self._hub.spawn(self._release_landed(task))
            raise

    async def _release_landed(self, task: asyncio.Future[Made]) -> None:
        with contextlib.suppress(ApiError, EngineError, JournalError):
            await self._release_unwanted((await task).pool_id)

    async def _release_unwanted(self, pool_id: int) -> None:
        await self.on_unwanted(pool_id)

    def _made(self, pool: Pool, status: int, state: wire.State | None) -> Made:
        return Made(pool.pool_id, status, json.dumps(self._show(pool, state), separators=(",", ":")))

    def _answer(self, error: Exception) -> ApiError:
        n_resident = sum(pool.seq is not None for pool in self._tree)
        grace_left_s = Lifetime(self._hub.ledger).grace_left_s(self._hub.clock.wall())
        return api_error(error, self._hub.hello, n_resident=n_resident, grace_left_s=grace_left_s)

    def _discard(self, pool_id: int, reason: str | None = None, *, lasting: bool = False) -> None:
        self._unmade.discard(pool_id, self._hub.clock.wall(), reason, lasting=lasting)

    # -- rebuild ----------------------------------------------------------------------------------------------------------

    async def bring(self, pool_id: int) -> Made:
        """Wait until a pool's KV is there, for which it is rebuilt if need be. ApiError when that fails."""
        flight = self.bringing(pool_id)
        if flight is not None:
            return await flight.wait()
        state = await self._hub.state()
        return self._made(self.find(pool_id), 200, state)

    def bringing(self, pool_id: int) -> PoolFlight | None:
        """The work that brings a pool's KV back, begun or joined; None when it is there. ApiError when it does not come back."""
        pool = self.find(pool_id)
        flight = self.flight(pool_id)
        if flight is None and pool.residency is not Residency.RESIDENT and not pool.rebuildable:
            message = f"pool {pool_id} is {pool.residency} ({pool.reason}) and is not brought back"
            raise ApiError("conflict", message, param="pool_id")
        return None if pool.residency is Residency.RESIDENT else flight or self.rebuild(pool_id)

    def rebuild(self, pool_id: int, *, unasked: bool = False) -> PoolFlight:
        """Begin to bring a pool's KV back, or join the work that does.

        `unasked`: as long as nobody waits for it, only from disk and only into room that is free.
        """
        flight = self.flight(pool_id)
        if flight is None:
            pool = self._hub.ledger.begin_rebuild(pool_id)
            flight = Flight(lambda own: self._rebuild(pool, own), unasked=unasked)
            self._flights[pool_id] = flight
            own = flight
            flight.when_over(lambda: self._rebuild_over(pool_id, own))
        return flight

    async def _rebuild(self, pool: Pool, flight: PoolFlight) -> Made:
        how = Rebuilt.FAILED
        failure: ApiError | None = None
        try:
            at, how = await self._brought(pool, flight)
            state = await self._hub.state()
            self._hub.post(self._hub.ledger.place(pool.pool_id, at))
            if pool.failure is not None:
                await asyncio.shield(asyncio.ensure_future(self._write_down(pool.pool_id, at)))
        except ApiError as error:
            failure = error
            raise
        except (EngineError, JournalError) as error:
            failure = self._answer(error)
            raise failure from error
        finally:
            self._rebuild_over(pool.pool_id, flight, how, failure)
        placed = self._tree.get(pool.pool_id)
        if placed is None or placed.residency is not Residency.RESIDENT:
            raise ApiError("engine_unavailable", "the engine went away while the pool was being made again", retry_after_s=1)
        return replace(self._made(placed, 200, state), restored=how is Rebuilt.RESTORED)

    async def _brought(self, pool: Pool, flight: PoolFlight) -> tuple[Placement, Rebuilt]:
        hello = self._hub.require_engine()
        if hello.model.fingerprint != pool.fingerprint:
            raise ApiError("conflict", f"pool {pool.pool_id} was made with another model")
        at = await self._builder.restore(pool, flight)
        if at is not None:
            return at, Rebuilt.RESTORED
        if flight.unasked:
            raise ApiError("conflict", f"pool {pool.pool_id} cannot be read from disk; it is computed when it is used")
        _, at = await self._builder.compute(pool, flight)
        return at, Rebuilt.MADE

    async def _write_down(self, pool_id: int, at: Placement) -> None:
        """What could not be made at first has no record in the journal yet."""
        placed = self._tree.get(pool_id)
        if placed is None or placed.residency is not Residency.RESIDENT:
            return
        try:
            await self._save(placed, self._made(placed, 200, None), None)
        except JournalError as error:
            self._discard(pool_id, str(error))
            await self.maker.give_back(at.seq, at.boot_id)
            raise

    def _rebuild_over(
        self, pool_id: int, flight: PoolFlight, how: Rebuilt = Rebuilt.FAILED, failure: ApiError | None = None
    ) -> None:
        """In the same turn in which the work ends, so that nobody finds a pool that is being made by nobody; idempotent."""
        if self._flights.get(pool_id) is not flight:
            return
        del self._flights[pool_id]
        placed = self._tree.get(pool_id)
        made = placed is not None and placed.residency is Residency.RESIDENT
        if made or not flight.unasked:
            self._hub.tally.rebuilds[how if made else Rebuilt.FAILED] += 1
        if placed is None or placed.residency is not Residency.MATERIALIZING:
            return
        if placed.failure is None or failure is None:
            self._hub.ledger.rebuild_failed(pool_id, "it could not be made again")
        else:
            self._discard(pool_id, str(failure), lasting=not failure.passing)

    async def stop(self) -> None:
        """Stop all work in progress."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        for flight in flights:
            await flight.ended()
