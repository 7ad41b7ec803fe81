"""Compaction: when room runs short an agent's history becomes a summary, and its pool a new branch.

Law: summarise with the old pool, swap pool and history in one update, release the old branch one step later. The new pool is a
branch of the stable ancestor: a node knows the whole prompt and forks before the swap; middleware swaps to the ancestor, and the
request that follows makes the branch. A crash in between leaves a pool to its lease, never a checkpoint whose pool was taken away.
Summaries are made by LangChain's own SummarizationMiddleware, which keeps calls and their results together.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Required

from langchain.agents.middleware.summarization import SummarizationMiddleware
from langchain_core.messages import AIMessage, AnyMessage, RemoveMessage, SystemMessage
from langchain_core.messages.utils import count_tokens_approximately
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.runtime import Runtime

from opencoti_langgraph.chat_models import OpencotiChatModel
from opencoti_langgraph.client import PoolClient
from opencoti_langgraph.errors import OpencotiError
from opencoti_langgraph.keeper import Held, PoolKeeper
from opencoti_langgraph.prefix import Prompt
from opencoti_langgraph.results import PoolRef
from opencoti_langgraph.state import PoolState, latest

LOG = logging.getLogger("opencoti_langgraph")
KEEP = ("messages", 6)
_RUNTIME: Runtime[None] = Runtime()
"""The stock hook wants one and does not look at it; its model call takes the run's context from where it is made."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """When to compact: at this pressure (0 to 1), or when fewer tokens than that are left in the context: those that the last reply
    said, less an estimate of what came since.
    """

    pressure: float = 0.8
    headroom_tokens: int = 512
    min_messages: int = 4

    def fires(self, messages: Sequence[AnyMessage], pressure: float | None) -> bool:
        """Is it time? Never for a history too short to become shorter."""
        if len(messages) < self.min_messages:
            return False
        return (pressure is not None and pressure >= self.pressure) or self._short(messages)

    def _short(self, messages: Sequence[AnyMessage]) -> bool:
        at = next((at for at in reversed(range(len(messages))) if isinstance(messages[at], AIMessage)), None)
        if at is None:
            return False
        left = (messages[at].response_metadata.get("headroom") or {}).get("ctx_tokens")
        return isinstance(left, int) and left - count_tokens_approximately(messages[at + 1 :]) < self.headroom_tokens


class Summariser:
    """The stock summariser, bound to the pool where the history is warm."""

    def __init__(self, model: OpencotiChatModel, keep: tuple[Any, Any] = KEEP, prompt: str | None = None) -> None:
        self._model, self._keep = model, keep
        self._prompt: dict[str, Any] = {} if prompt is None else {"summary_prompt": prompt}

    def _bound(self, pool_id: PoolRef | None) -> SummarizationMiddleware[Any, Any]:
        model = self._model.model_copy(update={} if pool_id is None else {"pool_id": pool_id})
        return SummarizationMiddleware(model, trigger=("messages", 1), keep=self._keep, **self._prompt)

    def short(self, messages: Sequence[AnyMessage], pool_id: PoolRef | None) -> list[AnyMessage] | None:
        """The shorter history; None when there is nothing to leave out."""
        return _history(self._bound(pool_id).before_model({"messages": list(messages)}, _RUNTIME))

    async def ashort(self, messages: Sequence[AnyMessage], pool_id: PoolRef | None) -> list[AnyMessage] | None:
        """As `short`."""
        return _history(await self._bound(pool_id).abefore_model({"messages": list(messages)}, _RUNTIME))


def _history(update: Mapping[str, Any] | None) -> list[AnyMessage] | None:
    if update is None:
        return None
    kept = [one for one in update["messages"] if not isinstance(one, RemoveMessage)]
    return [one if one.id else one.model_copy(update={"id": str(uuid.uuid4())}) for one in kept]


class CompactionState(PoolState, total=False):
    """Channels of a plain graph that compacts."""

    messages: Required[Annotated[list[AnyMessage], add_messages]]
    pool_prefix: Annotated[dict[str, Any] | None, latest]
    pool_retired: Annotated[list[Any], latest]


class CompactionNode:
    """A node for plain graphs, also a `pre_model_hook`. Put it before the node that calls the model.

    Args:
        model: What summarises, and by whose wording the new pool is made: the graph's own model.
        client: Of the proxy, or a keeper that is shared.
        system: The system prompt that the graph sends, if its messages do not begin with it.
        tools: The tools that it sends.
        trigger: When to compact.
        keep: What stays, as for SummarizationMiddleware.
        pre_model_hook: Also return `llm_input_messages`, every time: once set it would stay and be the model's input for ever.
    """

    def __init__(
        self,
        model: OpencotiChatModel,
        client: PoolClient | PoolKeeper,
        *,
        system: SystemMessage | str | None = None,
        tools: Sequence[Any] = (),
        trigger: Trigger = Trigger(),  # frozen
        keep: tuple[Any, Any] = KEEP,
        pre_model_hook: bool = False,
    ) -> None:
        self.keeper = client if isinstance(client, PoolKeeper) else PoolKeeper(client)
        self._model, self._trigger, self._tools, self._hook = model, trigger, list(tools), pre_model_hook
        self._system = [SystemMessage(system) if isinstance(system, str) else system] if system is not None else []
        self._summariser = Summariser(model, keep)

    def __call__(self, state: Any) -> dict[str, Any]:
        """The node."""
        self._release(state)
        if not self._trigger.fires(state["messages"], pressure_of(self.keeper.client)):
            return self._same(state)
        held = Held.of(state)
        short = self._summariser.short(state["messages"], held.pool_id if held else None)
        return self._same(state) if short is None else self._swapped(state, held, short)

    async def acall(self, state: Any) -> dict[str, Any]:
        """The node, for graphs that run async: `RunnableLambda(node, afunc=node.acall)`."""
        await asyncio.to_thread(self._release, state)
        if not self._trigger.fires(state["messages"], await asyncio.to_thread(pressure_of, self.keeper.client)):
            return self._same(state)
        held = Held.of(state)
        short = await self._summariser.ashort(state["messages"], held.pool_id if held else None)
        return self._same(state) if short is None else await asyncio.to_thread(self._swapped, state, held, short)

    def _release(self, state: Any) -> None:
        for pool_id in state.get("pool_retired") or []:
            self.keeper.retire(pool_id)

    def _same(self, state: Any) -> dict[str, Any]:
        done: dict[str, Any] = {"pool_retired": []} if state.get("pool_retired") else {}
        return {**done, "messages": [], **({"llm_input_messages": state["messages"]} if self._hook else {})}

    def _swapped(self, state: Any, held: Held | None, short: list[AnyMessage]) -> dict[str, Any]:
        prompt = Prompt.of(self._model.prompt_body([*self._system, *short], self._tools or None))
        new = self.keeper.refork(prompt, held, "node", "node")
        update = swapped(short, new, left_behind(held, given=True))
        return {**update, "llm_input_messages": short} if self._hook else update


def swapped(short: Sequence[AnyMessage], new: Held, old: list[PoolRef]) -> dict[str, Any]:
    """One update: the history, the pool, and what is to be released after it."""
    return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), *short], **new.update(), "pool_retired": old}


def left_behind(held: Held | None, *, given: bool = False) -> list[PoolRef]:
    """The old branch; never a base, which others share. `given`: also a pool that came by id, which is then this graph's own."""
    if held is None or held.pool_id is None:
        return []
    return [held.pool_id] if held.forked or (given and held.prints is None) else []


def pressure_of(client: PoolClient) -> float | None:
    """The proxy's `compaction_pressure`; None when it cannot be had, which never fails an agent."""
    try:
        return client.capacity().compaction_pressure
    except OpencotiError as error:
        LOG.info("no figure for compaction: %s", error)
        return None
