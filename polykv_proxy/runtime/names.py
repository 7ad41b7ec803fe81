"""Whose a name is when somebody orders a pool of that name.

Law: a name stands for one prefix. A pool that failed and that nobody uses gives its name to whoever asks for it; one of a
model that is gone keeps it, since the model may come back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from polykv_proxy.core.boots import MODEL_CHANGED
from polykv_proxy.core.ledger import Ledger
from polykv_proxy.core.pools import Pool, Residency
from polykv_proxy.core.prefix import Tokens
from polykv_proxy.core.unmade import Unmade
from polykv_proxy.errors import ApiError


class Names:
    """The names of one ledger. `release` forgets a pool, in the journal too, if nothing holds it."""

    def __init__(self, ledger: Ledger, release: Callable[[int], Awaitable[object]]) -> None:
        self._ledger = ledger
        self._release = release
        self._unmade = Unmade(ledger)

    async def vacate(self, name: str | None) -> None:
        """Release a pool of this name that failed its checks, if nobody uses it."""
        pool = self._ledger.tree.named(name) if name is not None else None
        if pool is None or pool.unmade or pool.residency is not Residency.FAILED or pool.reason == MODEL_CHANGED:
            return
        if not self._ledger.books.of_pool(pool.pool_id) and not self._ledger.in_the_way(pool.pool_id):
            await self._release(pool.pool_id)

    def holder(self, name: str | None, tokens: Tokens | None) -> Pool | None:
        """The pool that has this name and prefix already. ApiError 409 when the name stands for another."""
        pool = self._ledger.tree.named(name) if name is not None else None
        if pool is None or tokens is None:
            return None
        if pool.residency is Residency.RELEASING:
            raise ApiError("pool_releasing", f"pool {name!r} is being released; try again when it is gone", param="name")
        if pool.unmade:
            self._unmade.make_way(pool)
            return None
        failed = pool.residency is Residency.FAILED
        if not failed and pool.tokens.size == tokens.size and bool((pool.tokens == tokens).all()):
            return pool
        what = f"which is failed ({pool.reason})" if failed else "with another prefix"
        raise ApiError(
            "name_taken",
            f"the name {name!r} belongs to pool {pool.pool_id} {what}; release it first or choose another name",
            param="name",
            extra={"pool_id": pool.pool_id, "prefix_hash": pool.hashed.hex},
        )
