"""Declared pools: those of the pools file, made before the proxy is ready, and again whenever the engine has started anew.

Law: what is there with the declared prefix is kept; what has another is succeeded, never changed; what the file does not name stays
as it is. One pool that cannot be made stops none of the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from polykv_proxy.core.pools import Pool, PoolTree, Residency
from polykv_proxy.core.succession import succeed
from polykv_proxy.errors import ApiError, JournalError, PolykvError
from polykv_proxy.runtime.admission import Admission
from polykv_proxy.runtime.answers import api_error
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.lifetimes import LifetimeService
from polykv_proxy.runtime.link import EngineLink
from polykv_proxy.runtime.orders import Declared, Lease, PoolFlight, PoolSpec
from polykv_proxy.runtime.pools import PoolService

log = logging.getLogger("polykv.declared")

_UNNAMED_TTL_S = 86400.0
"""A successor has no name until it is there; one that a crash leaves behind in that state goes after this time."""
_AGAIN_S = 0.5
_TRIES = 5
"""In one boot: an engine that cuts a connection has died, nearly always, and the next try is made with the next boot."""
_AWAY = frozenset({"engine_unavailable", "engine_starting"})
_LASTING = frozenset({Residency.MATERIALIZING, Residency.RESIDENT, Residency.SAVED, Residency.EVICTED, Residency.LOST})


class Outcome(StrEnum):
    """How a declared pool stands. A word of the health page."""

    WAITING = "waiting"
    MAKING = "making"
    MADE = "made"
    KEPT = "kept"
    REPLACED = "replaced"
    RELEASED = "released"
    FAILED = "failed"


_THERE = frozenset({Outcome.MADE, Outcome.KEPT, Outcome.REPLACED})


@dataclass(frozen=True, slots=True)
class Standing:
    """Outcome, the pool's id where there is one, and why it failed: in words, and as an error code."""

    outcome: Outcome = Outcome.WAITING
    pool_id: int | None = None
    reason: str | None = None
    code: str | None = None


class DeclaredPools:
    """The pools of one file, each after its parent. `settled` is set when they have been made once, or cannot be."""

    def __init__(
        self,
        hub: Hub,
        pools: PoolService,
        lifetimes: LifetimeService,
        admission: Admission,
        link: EngineLink,
        *,
        declared: Sequence[Declared] = (),
    ) -> None:
        self._hub = hub
        self._pools = pools
        self._lifetimes = lifetimes
        self._admission = admission
        self._link = link
        self._declared = declared
        self._standings = {one.name: Standing() for one in declared}
        self._boot_id = ""
        self._flight: PoolFlight | None = None
        self._given: set[str] = set()
        """Names whose pin, time to live and policy were set: once in the life of a proxy, so that changes by hand stay."""
        self.settled = asyncio.Event()
        if not declared:
            self.settled.set()

    async def run(self) -> None:
        """Make them for each boot of the engine, for ever. An engine that goes away meanwhile is waited for."""
        tries = 0
        while self._declared:
            await self._link.other_boot("" if tries else self._boot_id)
            if self._hub.absent is not None:
                self._fail_all(f"pools are off: {self._hub.absent}")
                self.settled.set()
                await self._link.present()
                continue
            tries = tries + 1 if self._hub.boot_id == self._boot_id else 1
            self._boot_id = self._hub.boot_id
            if await self._make_all() or tries == _TRIES:
                tries = 0
                self.settled.set()
            else:
                await asyncio.sleep(_AGAIN_S)

    async def _make_all(self) -> bool:
        """All that are declared, in one boot of the engine. False when it went away meanwhile."""
        there: set[int] = set()
        self._pools.maker.room.spare = there
        try:
            for one in self._declared:
                standing = self._standings[one.name] = await self._make(one)
                if standing.outcome in _THERE and standing.pool_id is not None:
                    there.add(standing.pool_id)
                say = log.warning if standing.outcome is Outcome.FAILED else log.info
                say("declared pool %s: %s", one.name, ": ".join(filter(None, (standing.outcome, standing.reason))))
        finally:
            self._pools.maker.room.spare = frozenset()
        away = any(standing.code in _AWAY for standing in self._standings.values())
        return not away and self._hub.linked and self._hub.boot_id == self._boot_id

    async def _make(self, one: Declared) -> Standing:
        known = self._standings[one.name].pool_id
        if known is not None and self._tree.get(known) is None:
            return Standing(Outcome.RELEASED, known, "it was released; the next start of the proxy makes it again")
        self._standings[one.name] = Standing(Outcome.MAKING, known)
        try:
            outcome, pool_id = await self._ensure(one)
            await self._give_terms(one, pool_id)
        except Exception as error:
            if not isinstance(error, PolykvError):
                log.exception("declared pool %s", one.name)
            answer = api_error(error)
            return Standing(Outcome.FAILED, known, answer.message, answer.code)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Standing(Outcome.FAILED, known, "it was released while it was being made")
        finally:
            self._flight = None
        return Standing(outcome, pool_id)

    async def _ensure(self, one: Declared) -> tuple[Outcome, int]:
        """1. Nobody has the name: made. 2. Its holder is what is declared: kept, and brought back. 3. Else: succeeded."""
        spec = replace(one.spec, parent=self._parent_id(one))
        pool = await self._holder(one.name)
        if pool is None:
            return Outcome.MADE, await self._fly(self._pools.create(spec))
        if await self._is(pool, spec):
            flight = self._pools.bringing(pool.pool_id)
            return Outcome.KEPT, pool.pool_id if flight is None else await self._fly(flight)
        unnamed = replace(spec, name=None, ttl_s=_UNNAMED_TTL_S)
        made = await self._fly(self._pools.create(unnamed, keep=True))
        await self._admission.pass_on(pool.pool_id, made)
        await self._succeed(one, made)
        return Outcome.REPLACED, made

    def _parent_id(self, one: Declared) -> int | None:
        if one.parent is None:
            return None
        parent = self._standings[one.parent]
        if parent.outcome not in _THERE:
            raise ApiError("conflict", f"its parent {one.parent} is not there")
        return parent.pool_id

    async def _holder(self, name: str) -> Pool | None:
        """The pool that has this name, once nobody is making it."""
        while (pool := self._tree.named(name)) is not None and (flight := self._pools.flight(pool.pool_id)) is not None:
            with flight.held():
                await flight.ended()
        return pool

    async def _is(self, pool: Pool, spec: PoolSpec) -> bool:
        """Is a pool what is declared: the tokens, the parent, the place where it leaves that one?"""
        tokens = await self._pools.drafts.tokens_of(spec)
        assert tokens is not None
        if pool.residency not in _LASTING or pool.fingerprint != self._hub.require_engine().model.fingerprint:
            return False
        if pool.parent != spec.parent or spec.branch_pos not in {None, pool.branch_pos}:
            return False
        return pool.tokens.size == tokens.size and bool((pool.tokens == tokens).all())

    async def _fly(self, flight: PoolFlight) -> int:
        self._flight = flight
        return (await flight.wait()).pool_id

    async def _succeed(self, one: Declared, pool_id: int) -> None:
        succession = succeed(self._tree, one.name, pool_id, one.spec.ttl_s)
        try:
            await self._hub.journal.save_terms(succession.after)
        except JournalError:
            succession.undo(self._tree)
            raise
        log.info("declared pool %s has changed: pool %d has its name now", one.name, pool_id)

    async def _give_terms(self, one: Declared, pool_id: int) -> None:
        if one.name in self._given:
            return
        await self._lifetimes.set_ttl(pool_id, one.spec.ttl_s)
        if isinstance(one.pin, Lease):
            await self._lifetimes.pin(pool_id, one.pin.owner, one.pin.lease_s)
        elif one.pin is False:
            await self._lifetimes.unpin(pool_id, None)
        await self._admission.declare(pool_id, one.admission)
        self._given.add(one.name)

    def _fail_all(self, reason: str) -> None:
        for name, standing in self._standings.items():
            self._standings[name] = Standing(Outcome.FAILED, standing.pool_id, reason)

    @property
    def _tree(self) -> PoolTree:
        return self._hub.ledger.tree

    # -- what is shown --------------------------------------------------------------------------------------------------------

    def progress(self) -> str:
        """How far it is, in a few words."""
        n_over = sum(standing.outcome not in {Outcome.WAITING, Outcome.MAKING} for standing in self._standings.values())
        now = next((name for name, standing in self._standings.items() if standing.outcome is Outcome.MAKING), None)
        step = self._flight.latest.progress if self._flight is not None and self._flight.latest is not None else None
        tokens = f", {step.cached + step.processed} of {step.total} tokens" if step is not None else ""
        return f"making declared pools: {n_over} of {len(self._declared)}" + (f" ({now}{tokens})" if now else "")

    def summary(self) -> str:
        """What came of it, in a few words."""
        return f"declared: {sum(one.outcome in _THERE for one in self._standings.values())} of {len(self._declared)} are there"

    def failures(self) -> list[str]:
        """A line for each that could not be made."""
        failed = {name: one for name, one in self._standings.items() if one.outcome is Outcome.FAILED}
        return [f"declared pool {name} could not be made: {standing.reason}" for name, standing in failed.items()]

    def facts(self) -> dict[str, object] | None:
        """For the health page; None without a pools file."""
        if not self._declared:
            return None
        outcomes = [standing.outcome for standing in self._standings.values()]
        return {
            "settled": self.settled.is_set(),
            "n_declared": len(outcomes),
            "n_there": sum(outcome in _THERE for outcome in outcomes),
            "n_failed": outcomes.count(Outcome.FAILED),
            "pools": [self._fact(name, standing) for name, standing in self._standings.items()],
        }

    def _fact(self, name: str, standing: Standing) -> Mapping[str, object]:
        pool = self._tree.get(standing.pool_id) if standing.pool_id is not None else None
        return {
            "name": name,
            "outcome": standing.outcome.value,
            "pool_id": standing.pool_id,
            "residency": pool.residency.value if pool is not None else None,
            "reason": standing.reason,
        }
