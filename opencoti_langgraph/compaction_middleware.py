"""`CompactionMiddleware`: compaction for `create_agent` and whatever is built on it.

Law: it stands before BackpressureMiddleware and PoolMiddleware, shares the latter's keeper, and only rewrites; that the next
request fits its pool is the innermost middleware's business, whoever rewrote the history.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware.types import AgentMiddleware, PrivateStateAttr
from langchain_core.messages import AnyMessage
from langgraph.runtime import Runtime

from opencoti_langgraph.chat_models import OpencotiChatModel
from opencoti_langgraph.compaction import KEEP, Summariser, Trigger, left_behind, pressure_of, swapped
from opencoti_langgraph.keeper import Held
from opencoti_langgraph.pool_middleware import PoolAgentState, PoolMiddleware
from opencoti_langgraph.prefix import N_HEAD


class CompactionAgentState(PoolAgentState):
    """Pools to be released after the next step. A child has its own."""

    pool_retired: NotRequired[Annotated[list[Any], PrivateStateAttr]]


class CompactionMiddleware(AgentMiddleware[Any, Any, Any]):
    """Summarises when room runs short, and swaps the agent's pool for a shorter branch.

    Args:
        model: What summarises: the agent's own model, so that its pool is warm.
        pools: The agent's PoolMiddleware.
        trigger: When.
        keep: What stays, as for SummarizationMiddleware.
    """

    state_schema = CompactionAgentState

    def __init__(
        self,
        model: OpencotiChatModel,
        pools: PoolMiddleware,
        *,
        trigger: Trigger = Trigger(),  # noqa: B008 # frozen
        keep: tuple[Any, Any] = KEEP,
        summary_prompt: str | None = None,
    ) -> None:
        super().__init__()
        self._model, self._keeper, self._trigger = model, pools.keeper, trigger
        self._summariser = Summariser(model, keep, summary_prompt)

    def before_model(self, state: CompactionAgentState, runtime: Runtime[Any]) -> dict[str, Any] | None:  # the hook's form
        """Summarise, fork and swap, when it is time."""
        if not self._trigger.fires(state["messages"], pressure_of(self._keeper.client)):
            return None
        held = Held.of(state)
        short = self._summariser.short(state["messages"], held.pool_id if held else None)
        return None if short is None else self._swap(state, held, short)

    async def abefore_model(self, state: CompactionAgentState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """As `before_model`."""
        if not self._trigger.fires(state["messages"], await asyncio.to_thread(pressure_of, self._keeper.client)):
            return None
        held = Held.of(state)
        short = await self._summariser.ashort(state["messages"], held.pool_id if held else None)
        return None if short is None else self._swap(state, held, short)

    def after_model(self, state: CompactionAgentState, runtime: Runtime[Any]) -> dict[str, Any] | None:  # the hook's form
        """Release what was swapped before this step's call: the state that names the new pool is safe by now."""
        for pool_id in state.get("pool_retired") or []:
            self._keeper.retire(pool_id)
        return {"pool_retired": []} if state.get("pool_retired") else None

    async def aafter_model(self, state: CompactionAgentState, runtime: Runtime[Any]) -> dict[str, Any] | None:
        """As `after_model`."""
        return await asyncio.to_thread(self.after_model, state, runtime)

    def _swap(self, state: CompactionAgentState, held: Held | None, short: list[AnyMessage]) -> dict[str, Any]:
        """To the root, as nobody's: PoolMiddleware, which alone sees the whole prompt, branches there for the next request."""
        old = [*(state.get("pool_retired") or []), *left_behind(held)]
        root = Held(None) if held is None or not held.path else Held(held.path[0], (held.prints or [])[:N_HEAD], held.path[:1])
        return swapped(short, root, old)
