"""From an order to a prefix and its place in the tree, before anything is made.

Law: changes nothing. The tokens are the engine's own; nothing is awaited between a look at the parent and the decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from polykv_proxy.core.branch import branch_position
from polykv_proxy.core.pools import Pool, Residency
from polykv_proxy.core.prefix import Tokens
from polykv_proxy.errors import ApiError
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.orders import PoolFlight, PoolSpec
from polykv_proxy.runtime.prefixes import check_tokens, prefix_of_messages, prefix_of_prompt
from polykv_proxy.runtime.texts import with_texts


class Drafts:
    """Settles orders. `find` gives a pool (ApiError 404), `flight` the work in progress on it."""

    def __init__(self, hub: Hub, find: Callable[[int], Pool], flight: Callable[[int], PoolFlight | None]) -> None:
        self._hub = hub
        self._find = find
        self._flight = flight

    async def tokens_of(self, spec: PoolSpec) -> Tokens | None:
        """The token ids of the full prefix; None for a snapshot, whose tokens are known when it is made."""
        if spec.from_session is not None:
            return None
        if spec.tokens is not None:
            tokens = spec.tokens
        elif spec.prompt is not None:
            tokens = await prefix_of_prompt(self._hub.client, spec.prompt)
        else:
            assert spec.conversation is not None
            tokens = await prefix_of_messages(self._hub.client, spec.conversation)
        check_tokens(tokens, self._hub.require_engine(), spec.source)
        return tokens

    async def branched(self, spec: PoolSpec, tokens: Tokens | None) -> PoolSpec:
        """The spec with the position at which it leaves its parent. Nothing is awaited after the parent was looked at."""
        if spec.beside is not None:
            return await self._beside(spec, tokens)
        if spec.parent is None:
            return spec
        parent = await self._forkable(spec.parent)
        if tokens is None:
            return spec
        return replace(spec, branch_pos=await self._branch(parent, tokens, spec.branch_pos))

    async def branch_of(self, spec: PoolSpec, tokens: Tokens) -> int:
        """Where what a session gave leaves the parent that it was ordered for; 0 without one. ApiError."""
        parent = self._hub.ledger.tree.get(spec.parent) if spec.parent is not None else None
        return 0 if parent is None else await self._branch(parent, tokens, spec.branch_pos)

    def nearest(self, tokens: Tokens) -> PoolSpec:
        """An order that names the pool on whose KV these tokens are computed soonest."""
        best = self._hub.ledger.tree.match(tokens)
        if best is None or tokens.size < 2:
            return PoolSpec()
        return PoolSpec(beside=best.key, keep_to=min(best.length, int(tokens.size) - 1))

    async def _branch(self, parent: Pool, tokens: Tokens, wanted: int | None) -> int:
        try:
            return branch_position(parent, tokens, wanted)
        except ApiError as error:
            raise await with_texts(self._hub.client, error, parent=parent.tokens, prefix=tokens) from error

    async def _beside(self, spec: PoolSpec, tokens: Tokens | None) -> PoolSpec:
        """The spec of a sibling of a pool, which shares what it keeps of that pool although it is not its child."""
        assert spec.beside is not None
        assert tokens is not None
        old = await self._forkable(spec.beside)
        try:
            keep_to = branch_position(old, tokens, spec.keep_to, "keep_to")
        except ApiError as error:
            raise await with_texts(self._hub.client, error, pool=old.tokens, prefix=tokens) from error
        parent = self._hub.ledger.tree.get(old.parent) if old.parent is not None else None
        if parent is None:
            return replace(spec, keep_to=keep_to)
        branch_pos = branch_position(parent, tokens, min(keep_to, old.branch_pos), "keep_to")
        return replace(spec, keep_to=keep_to, parent=parent.pool_id, branch_pos=branch_pos)

    async def _forkable(self, pool_id: int) -> Pool:
        """A pool whose tokens are settled. ApiError when it cannot be a parent."""
        while (flight := self._flight(pool_id)) is not None:
            with flight.held():
                await flight.ended()
        parent = self._find(pool_id)
        if parent.residency is Residency.RELEASING:
            raise ApiError("pool_releasing", f"pool {pool_id} is being released and cannot be forked", param="pool_id")
        if parent.residency is Residency.FAILED:
            raise ApiError("conflict", f"pool {pool_id} is failed ({parent.reason}) and cannot be forked", param="pool_id")
        return parent
