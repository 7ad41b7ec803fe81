"""`BackpressureMiddleware`: what an agent does when the proxy has no room for its next call.

Law: the wait is what the proxy said, and bounded as a whole; nothing is retried that could not be admitted later. LangChain's own
retry middleware does not read `retry_after`, and by default turns saturation into an answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ModelResponse
from langgraph.types import interrupt

from opencoti_langgraph.errors import PoolSaturatedError, PoolUnavailableError

DEFAULT_WAIT_S = 1.0
"""Where the answer did not say."""
_PASSING = (PoolSaturatedError, PoolUnavailableError)


class BackpressureMiddleware(AgentMiddleware[Any, Any, Any]):
    """Waits, interrupts or raises where a model call was refused for now.

    Args:
        mode: `wait`: sleep as long as the proxy said, then try again. `interrupt`: hand the graph back to its driver, with when to
            come back; needs a checkpointer. `raise`: PoolSaturatedError goes through.
        max_wait_s: All waits of one call together; then the error goes through.
        spread: Each wait is longer by a random part of this share, so that a fleet does not come back as one.
    """

    def __init__(
        self,
        mode: Literal["wait", "interrupt", "raise"] = "wait",
        *,
        max_wait_s: float = 120.0,
        spread: float = 0.25,
        sleep: Callable[[float], None] = time.sleep,
        asleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__()
        if mode not in {"wait", "interrupt", "raise"}:
            raise ValueError(f"mode is one of wait, interrupt and raise, not {mode!r}")
        self._mode, self._max_wait_s, self._spread = mode, max_wait_s, spread
        self._sleep, self._asleep = sleep, asleep

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Call until admitted, or until the bound."""
        waited = 0.0
        while True:
            try:
                return handler(request)
            except _PASSING as error:
                wait = self._wait(error, waited)
                if wait is None:
                    raise
            self._sleep(wait)
            waited += wait

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """As `wrap_model_call`."""
        waited = 0.0
        while True:
            try:
                return await handler(request)
            except _PASSING as error:
                wait = self._wait(error, waited)
                if wait is None:
                    raise
            await self._asleep(wait)
            waited += wait

    def _wait(self, error: PoolSaturatedError | PoolUnavailableError, waited: float) -> float | None:
        """How long to wait now; None when it is enough. Comes back from an interrupt with no wait."""
        if self._mode == "raise" or not error.should_retry:
            return None
        told = DEFAULT_WAIT_S if error.retry_after is None else max(0.0, error.retry_after)
        if self._mode == "interrupt":
            interrupt({**error.details, "type": "pool_saturated", "retry_after": told})
            return 0.0
        if waited + told > self._max_wait_s:
            return None
        return told * (1 + self._spread * random.random())  # noqa: S311 # spreads load, keeps no secret
