"""The self-check of pools: what a pool answers beside what is computed without it, and what follows when they differ.

Law: one pool at a time. Nothing is said that was not seen: what cannot be proved is inconclusive. A pool that differs is replaced
before the verdict is told, although its caller leaves; everything else ends with the last who waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from polykv_proxy.core import verification
from polykv_proxy.core.pools import Pool, Residency, Verdict
from polykv_proxy.core.verification import Judgement
from polykv_proxy.errors import ApiError, EngineError, EngineRefusedError
from polykv_proxy.runtime.answers import api_error
from polykv_proxy.runtime.flight import Flight
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.look import Look
from polykv_proxy.runtime.pools import PoolService
from polykv_proxy.runtime.quarantines import Quarantines
from polykv_proxy.runtime.sampler import UnprovenError

log = logging.getLogger("polykv.verify")


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """Where to look: at these positions, or at so many of our own choice."""

    positions: tuple[int, ...] | None = None
    n_positions: int = verification.DEFAULT_POSITIONS


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. `quarantined`: pools that were made anew, with this one among them."""

    verdict: Verdict
    reason: str | None = None
    judgement: Judgement = field(default_factory=lambda: Judgement({}, verification.LEAST))
    n_computed: int = 0
    quarantined: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    """A finding, how long it took, and where the pool's KV is now."""

    pool_id: int
    finding: Finding
    took_s: float
    residency: Residency


CheckFlight: TypeAlias = Flight[Checked, None]


class Verifier:
    """Checks pools of one hub."""

    def __init__(self, hub: Hub, pools: PoolService) -> None:
        self._hub = hub
        self._pools = pools
        self._quarantines = Quarantines(hub, pools)
        self._flights: dict[int, CheckFlight] = {}
        self._turn = asyncio.Lock()

    def verify(self, pool_id: int, order: CheckOrder) -> CheckFlight:
        """Begin to check a pool, or join the check that runs, wherever that one looks. ApiError 400, 404, 409, 501 or 503."""
        flight = self._flights.get(pool_id)
        if flight is None or flight.ending:
            self._hub.require_engine()
            self._check_order(self._checkable(pool_id), order)
            flight = self._flights[pool_id] = Flight(lambda _: self._verify(pool_id, order))
            own = flight
            flight.when_over(lambda: self._forget(pool_id, own))
        return flight

    async def stop(self) -> None:
        """Stop all checks; they leave nothing behind."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        for flight in flights:
            await flight.ended()

    def _forget(self, pool_id: int, flight: CheckFlight) -> None:
        if self._flights.get(pool_id) is flight:
            del self._flights[pool_id]

    def _checkable(self, pool_id: int) -> Pool:
        pool = self._pools.find(pool_id)
        if pool.residency is Residency.MATERIALIZING:
            raise ApiError("pool_busy", f"pool {pool_id} is being made; verify it when it is there", param="pool_id")
        if pool.residency is Residency.RELEASING:
            raise ApiError("pool_releasing", f"pool {pool_id} is being released", param="pool_id")
        return pool

    def _check_order(self, pool: Pool, order: CheckOrder) -> None:
        last = self._longest(pool)
        for position in order.positions or ():
            if not 2 <= position <= last:
                message = f"positions are places after 2 to {last} tokens of this pool's prefix, not {position}"
                raise ApiError("invalid_request", message, param="positions")

    def _longest(self, pool: Pool) -> int:
        """Tokens of the longest prompt of a check: a request has room for one less than its context."""
        return min(pool.prefix_len + verification.N_TAIL, self._hub.require_engine().n_ctx_slot - 1)

    async def _verify(self, pool_id: int, order: CheckOrder) -> Checked:
        async with self._turn:
            began = self._hub.clock.monotonic()
            finding = await self._find(self._checkable(pool_id), order)
            return Checked(pool_id, finding, self._hub.clock.monotonic() - began, self._pools.find(pool_id).residency)

    async def _find(self, pool: Pool, order: CheckOrder) -> Finding:
        if pool.seq is None:
            why = f"there is nothing to verify: the pool is {pool.residency}, its KV is not in the cache"
            return self._found(pool, Finding(Verdict.INCONCLUSIVE, why))
        look = Look(self._hub, self._pools.maker.room, pool, pool.seq, self._positions(pool, order))
        try:
            suspect = await look.suspect()
        except (UnprovenError, EngineRefusedError) as error:
            said = f"the engine refused: {error}" if isinstance(error, EngineRefusedError) else str(error)
            return self._found(pool, Finding(Verdict.INCONCLUSIVE, said, look.judgement, look.sampler.n_computed))
        except EngineError as error:
            raise api_error(error) from error
        if suspect is None:
            return self._found(pool, Finding(Verdict.OK, None, look.judgement, look.sampler.n_computed))
        return await asyncio.shield(self._hub.spawn(self._replace(pool, look, suspect)))

    def _positions(self, pool: Pool, order: CheckOrder) -> tuple[int, ...]:
        if order.positions is not None:
            return tuple(sorted(set(order.positions)))
        turn = pool.checks.n_checks
        return verification.choose_positions(pool.prefix_len, pool.n_shared, self._longest(pool), order.n_positions, turn)

    async def _replace(self, pool: Pool, look: Look, suspect: str) -> Finding:
        """Make anew what is wrong, and look again.

        1. all that hold cells of the sequence that is to blame; 2. if the pool still differs, all that share its first cells; 3. if
        it does even when it shares none, it is not used any more: what the engine computes is not what it computes another time.
        """
        quarantines, judged = self._quarantines, look.judgement
        blamed = quarantines.core.blame(look.seq, look.n_doubted)
        replaced = set(await quarantines.replace(blamed, f"pool {pool.pool_id}: {suspect}"))
        differs = await self._differs(pool, look)
        if differs and (root := quarantines.core.root(look.seq)) != look.seq:
            replaced |= set(await quarantines.replace(root, f"pool {pool.pool_id}, made anew: {suspect}"))
            differs = await self._differs(pool, look)
        if differs:
            suspect += "; so it does when it is made anew, and it is not used any more"
            await quarantines.give_up(pool.pool_id, suspect)
        return self._found(pool, Finding(Verdict.MISMATCH, suspect, judged, look.sampler.n_computed, tuple(sorted(replaced))))

    async def _differs(self, pool: Pool, look: Look) -> bool:
        """Is the pool, made anew, still wrong? One that cannot be looked at now is as good as any new one."""
        now = self._hub.ledger.tree.get(pool.pool_id)
        if now is None or now.seq is None:
            return False
        try:
            return await look.again(now.seq)
        except (UnprovenError, EngineError) as error:
            log.warning("pool %d was made anew and could not be looked at: %s", pool.pool_id, error)
            return False

    def _found(self, pool: Pool, finding: Finding) -> Finding:
        """Enter what was found into the record, if the pool is still there."""
        self._hub.tally.checks[finding.verdict] += 1
        now = self._hub.ledger.tree.get(pool.pool_id)
        if now is not None:
            self._hub.ledger.tree.put(replace(now, checks=now.checks.after(finding.verdict, self._hub.clock.wall())))
        log.info("pool %d: %s%s", pool.pool_id, finding.verdict, f", {finding.reason}" if finding.reason else "")
        return finding
