"""How a pool's KV comes to be: taken from a session, read from its copy, or computed on the nearest pool above it that has KV.

Law: answers where the KV lies now. The pool's own record is its caller's business; of others it changes only what it finds untrue.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable

from polykv_proxy.core.ledger import Placement
from polykv_proxy.core.pools import Pool, PoolTree, SavedCopy, SeqRef
from polykv_proxy.core.quarantine import Quarantine
from polykv_proxy.core.tally import Copied
from polykv_proxy.engine import wire
from polykv_proxy.errors import ApiError, EngineError, EngineRefusedError, EngineUnavailableError
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.maker import Maker
from polykv_proxy.runtime.orders import PoolFlight, PoolSpec, Step
from polykv_proxy.runtime.vault import Vault

log = logging.getLogger("polykv.builder")


class Builder:
    """Builds for one hub. `bring` waits until a pool has KV, rebuilding it if need be; ApiError when that fails."""

    def __init__(self, hub: Hub, vault: Vault, bring: Callable[[int], Awaitable[object]]) -> None:
        self._hub = hub
        self._vault = vault
        self._bring = bring
        self._quarantine = Quarantine(hub.ledger)
        self.maker = Maker(hub, vault)

    @property
    def _tree(self) -> PoolTree:
        return self._hub.ledger.tree

    async def snapshot(self, pool_id: int, spec: PoolSpec, flight: PoolFlight) -> tuple[wire.Made, Placement]:
        """What a session holds. ApiError 404 without that session."""
        assert spec.from_session is not None
        session = self._hub.ledger.sessions.get(spec.from_session)
        if session is None:
            raise ApiError("session_not_found", f"there is no session {spec.from_session!r}", param="from_session")
        body: dict[str, object] = {"session": session.number}
        if spec.n_tokens is not None:
            body["n_tokens"] = spec.n_tokens
        boot_id = self._hub.boot_id
        made = await self.maker.make(body, lambda step: flight.report(Step(pool_id, step)))
        at = _placement(boot_id, made)
        if self._quarantine.tainted(at.base, at.n_shared):
            await self.maker.give_back(at.seq, at.boot_id)
            message = f"session {spec.from_session!r} ran on KV that failed a check; its next turn is computed anew"
            raise ApiError("session_not_resident", message, param="from_session")
        return made, at

    async def restore(self, pool: Pool, flight: PoolFlight) -> Placement | None:
        """Read a pool's copy, its parents first where it starts on them. None: there is none that can be used, or not now.

        A copy that is refused is deleted. ApiError, EngineError: then it cannot be computed either.
        """
        copy = await self._copy_of(pool)
        base, agreed = await self._bring_base(pool, flight) if copy is not None and copy.start else (None, 0)
        if copy is None or agreed < copy.start:
            return None
        boot_id = self._hub.boot_id
        try:
            made = await self.maker.restore(pool, copy, base, lambda: not flight.unasked)
        except EngineRefusedError as error:
            if error.kind == "no_seq_ids":
                raise
            await self._judge(pool, base, error)
            return None
        except EngineUnavailableError:
            raise
        except EngineError as error:
            log.warning("the copy of pool %d could not be read now: %s", pool.pool_id, error)
            return None
        at = _placement(boot_id, made)
        if await self._copy_of(pool) != copy or self._quarantine.tainted(at.base, at.n_shared):
            await self.maker.give_back(at.seq, at.boot_id)
            return None
        self._hub.tally.copies[Copied.READ] += 1
        return at

    async def _copy_of(self, pool: Pool) -> SavedCopy | None:
        """The copy that may be believed at this moment; one that is being read is taken away only with what failed a check."""
        async with self._hub.cleaning:
            now = self._tree.get(pool.pool_id)
        return now.copy if now is not None else pool.copy

    async def _judge(self, pool: Pool, base: SeqRef | None, error: EngineRefusedError) -> None:
        """What a refusal says: that the parent's sequence is gone, that the file is bad, or nothing about it."""
        held = {seq.seq for seq in (await self._hub.client.state()).seqs}
        if base is not None and str(base) not in held:
            self._hub.ledger.lose_seq(base, "the engine no longer holds its sequence")
        elif error.kind in {"file_refused", "invalid_request_error"}:
            await self._vault.refuse(pool.pool_id, error.message)
        else:
            log.warning("the copy of pool %d could not be read now: %s", pool.pool_id, error)

    async def compute(self, pool: Pool, flight: PoolFlight, spec: PoolSpec | None = None) -> tuple[wire.Made, Placement]:
        """Prefill a pool's own tokens onto its parent's; once more when that failed a check meanwhile."""
        while True:
            async with self._hub.cleaning:
                pass
            made, at = await self._compute(pool, flight, spec)
            if not self._quarantine.tainted(at.base, at.n_shared):
                return made, at
            await self.maker.give_back(at.seq, at.boot_id)

    async def _compute(self, pool: Pool, flight: PoolFlight, spec: PoolSpec | None) -> tuple[wire.Made, Placement]:
        """A parent that is lost meanwhile is brought back, once. What takes the place of another pool is prefilled onto that one,
        while it has KV.
        """
        old = self._tree.get(spec.beside) if spec is not None and spec.beside is not None else None
        if spec is not None and spec.keep_to is not None and old is not None and old.seq is not None:
            with contextlib.suppress(EngineRefusedError):
                return await self._prefill(pool, old.seq, spec.keep_to, flight)
        base, branch_pos = await self._bring_base(pool, flight)
        try:
            return await self._prefill(pool, base, branch_pos, flight)
        except EngineRefusedError as error:
            if error.kind != "stale_seq" or base is None:
                raise
            self._hub.ledger.lose_seq(base, "the engine no longer holds its sequence")
        base, branch_pos = await self._bring_base(pool, flight)
        return await self._prefill(pool, base, branch_pos, flight)

    async def _prefill(self, pool: Pool, base: SeqRef | None, branch_pos: int, flight: PoolFlight) -> tuple[wire.Made, Placement]:
        body: dict[str, object] = {"tokens": pool.tokens.tolist()}
        if base is not None:
            body |= {"parent_seq": str(base), "branch_pos": branch_pos}
        boot_id = self._hub.boot_id
        made = await self.maker.make(body, lambda step: flight.report(Step(pool.pool_id, step)), pool.prefix_len - branch_pos)
        return made, _placement(boot_id, made)

    async def _bring_base(self, pool: Pool, flight: PoolFlight) -> tuple[SeqRef | None, int]:
        """What to build on, and up to where.

        1. the parent, which is rebuilt when it has no KV and there is room for all that lack it, unless nobody asked
        2. the nearest above it that has KV, which holds the same beginning
        3. nothing
        """
        parent = self._tree.get(pool.parent) if pool.parent is not None else None
        if parent is not None and not flight.unasked and self.maker.room.can_bring(parent):
            try:
                await self._bring(parent.pool_id)
            except ApiError as error:
                if error.code not in {"pool_seqs_exhausted", "saturated"}:
                    raise
                log.info("pool %d is made without its parent %d: %s", pool.pool_id, parent.pool_id, error)
        branch_pos = pool.branch_pos
        for above in self._tree.ancestors(pool.pool_id):
            if above.seq is not None:
                return above.seq, branch_pos
            branch_pos = min(branch_pos, above.branch_pos)
        return None, 0


def _placement(boot_id: str, made: wire.Made) -> Placement:
    return Placement(boot_id, made.ref, made.cells, made.base_ref, made.n_shared)
