"""The gate as a LangChain rate limiter: a request of a model waits until the proxy has room.

Law: a rate limiter sees no pool, so only the default policy and the engine's own limits count. A pool's own floor is the gate's and
the proxy's business.
"""

from __future__ import annotations

import asyncio

from langchain_core.rate_limiters import BaseRateLimiter

from opencoti_langgraph.client import PoolClient
from opencoti_langgraph.room import Ask, Patience, seen, startable


class PoolAdmissionLimiter(BaseRateLimiter):
    """Give it as `rate_limiter=` to any chat model that talks to the proxy. GateClosedError when there is no room in time."""

    def __init__(self, client: PoolClient, *, expected_tokens: int | None = None, patience: Patience | None = None) -> None:
        self._client, self._ask, self._patience = client, Ask(None, expected_tokens), patience or Patience()

    def acquire(self, *, blocking: bool = True) -> bool:
        """Wait for room; without `blocking` say whether there is."""
        if blocking:
            self._patience.until(self._client, self._ask)
            return True
        return startable(seen(self._client, self._ask)) > 0

    async def aacquire(self, *, blocking: bool = True) -> bool:
        """As `acquire`."""
        if blocking:
            await self._patience.auntil(self._client, self._ask)
            return True
        return startable(await asyncio.to_thread(seen, self._client, self._ask)) > 0
