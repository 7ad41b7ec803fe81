"""`PoolMiddleware`: every model call of an agent goes to the right pool, its children's too.

Law: list it last. Only the innermost middleware sees the system prompt and tools that are sent. What it keeps is visible to
children and never flows back from them, so children that run at once do not collide. It never fails a call of its own accord.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware.types import (
    AgentMiddleware,
    AgentState,
    ExtendedModelResponse,
    ModelRequest,
    ModelResponse,
    OmitFromSchema,
)
from langchain_core.messages import AnyMessage
from langgraph.config import get_config
from langgraph.runtime import Runtime
from langgraph.types import Command

from opencoti_langgraph.chat_models import OpencotiChatModel
from opencoti_langgraph.client import PoolClient
from opencoti_langgraph.keeper import Held, Place, PoolKeeper, gone
from opencoti_langgraph.prefix import Divergence, Prompt, print_of

INHERITED = OmitFromSchema(input=False, output=True)
"""Children see it, nothing comes back. A plain key would collide, a private one would not be seen."""


class PoolAgentState(AgentState[Any]):
    """The agent's pool, and what that pool begins with."""

    pool_id: NotRequired[Annotated[int | str | None, INHERITED]]
    pool_prefix: NotRequired[Annotated[dict[str, Any] | None, INHERITED]]


class PoolMiddleware(AgentMiddleware[Any, Any, Any]):
    """Base pools by system prompt and tools, forks for children that go on from their parent, one session for each agent.

    Args:
        client: Of the proxy, or a keeper that several middlewares share.
        end_session: End an agent's session when the agent has finished: `children` (default), `all` or `none`. Sessions also end
            by the proxy's own limit.
        on_divergence: Called with the agent and the place where its prompt left its pool.
    """

    state_schema = PoolAgentState

    def __init__(
        self,
        client: PoolClient | PoolKeeper,
        *,
        end_session: str = "children",
        on_divergence: Callable[[str, Divergence], None] | None = None,
    ) -> None:
        super().__init__()
        if end_session not in {"children", "all", "none"}:
            raise ValueError(f"end_session is one of children, all and none, not {end_session!r}")
        self.keeper = client if isinstance(client, PoolKeeper) else PoolKeeper(client, on_divergence=on_divergence)
        self._end_session = end_session

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any] | ExtendedModelResponse[Any]:
        """Place the request, call, and go to another pool once when that one is gone."""
        call = _Call.of(request)
        if call is None:
            return handler(request)
        place = self.keeper.place(*call.place)
        try:
            return call.done(handler(call.to(place)), place)
        except Exception as error:
            if not gone(error):
                raise
        place = Place(self.keeper.again(call.prompt, place.held, call.session, call.kind), place.diverged)
        try:
            return call.done(handler(call.to(place)), place)
        except Exception as error:
            if not gone(error):
                raise
        return call.done(handler(call.to(Place(Held(None)))), Place(Held(None)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any] | ExtendedModelResponse[Any]:
        """As `wrap_model_call`."""
        call = _Call.of(request)
        if call is None:
            return await handler(request)
        place = await asyncio.to_thread(self.keeper.place, *call.place)
        try:
            return call.done(await handler(call.to(place)), place)
        except Exception as error:
            if not gone(error):
                raise
        again = await asyncio.to_thread(self.keeper.again, call.prompt, place.held, call.session, call.kind)
        place = Place(again, place.diverged)
        try:
            return call.done(await handler(call.to(place)), place)
        except Exception as error:
            if not gone(error):
                raise
        return call.done(await handler(call.to(Place(Held(None)))), Place(Held(None)))

    def after_agent(self, state: PoolAgentState, runtime: Runtime[Any]) -> None:  # the hook's form
        """Clean up after an agent that has finished. One that failed is cleaned up by leases."""
        session, _, is_child = identity(state["messages"])
        if self._end_session == "all" or (self._end_session == "children" and is_child):
            held = Held.of(state)
            self.keeper.leave(session, held if held is not None and held.owner == session else None)

    async def aafter_agent(self, state: PoolAgentState, runtime: Runtime[Any]) -> None:
        """As `after_agent`."""
        await asyncio.to_thread(self.after_agent, state, runtime)


class _Call:
    """One model call on its way: its prompt, whose it is, and what was held before."""

    def __init__(self, request: ModelRequest[Any], model: OpencotiChatModel) -> None:
        self._request = request
        system = [request.system_message] if request.system_message is not None else []
        kwargs = request.model_settings.get("chat_template_kwargs")
        model = model if kwargs is None else model.model_copy(update={"chat_template_kwargs": kwargs})
        self.prompt = Prompt.of(model.prompt_body([*system, *request.messages], request.tools))
        self.session, self.kind, _ = identity(request.messages)
        self.session = str(request.model_settings.get("session_id") or self.session)
        self.held = Held.of(request.state)

    @classmethod
    def of(cls, request: ModelRequest[Any]) -> _Call | None:
        """None for other models, and where somebody chose the pool already."""
        if not isinstance(request.model, OpencotiChatModel) or request.model_settings.get("pool_id") is not None:
            return None
        return cls(request, request.model)

    @property
    def place(self) -> tuple[Prompt, Held | None, str, str]:
        """Arguments of `PoolKeeper.place`."""
        return self.prompt, self.held, self.session, self.kind

    def to(self, place: Place) -> ModelRequest[Any]:
        """The request, to that pool."""
        ours = {"pool_id": place.held.pool_id, "session_id": self.session}
        settings = {**self._request.model_settings, **{key: value for key, value in ours.items() if value is not None}}
        return self._request.override(model_settings=settings)

    def done(self, response: ModelResponse[Any], place: Place) -> ModelResponse[Any] | ExtendedModelResponse[Any]:
        """The reply, with what is held from now on, and with the divergence in its metadata."""
        if place.diverged is not None:
            for message in response.result:
                message.response_metadata["prefix_divergence"] = asdict(place.diverged)
        if place.held == self.held:
            return response
        return ExtendedModelResponse(model_response=response, command=Command(update=place.held.update()))


def identity(messages: list[AnyMessage]) -> tuple[str, str, bool]:
    """An agent's session, its kind, and whether it is a child: by thread and place in the graph, never by its name alone.

    The last part of the place is the step and changes; those before are stable while the agent lives. Without a thread the
    conversation's first message tells agents apart; so it does for an agent that is a node of its own name, as in swarms, which is
    started anew with each turn, goes on with the same list, and is no child.
    """
    config = get_config()
    configurable, metadata = config.get("configurable", {}), config.get("metadata", {})
    above = str(configurable.get("checkpoint_ns") or "").split("|")[:-1]
    places = [part.split(":")[0] for part in above]
    named = str(metadata.get("lc_agent_name") or "agent")
    name = "".join(c for c in named if c.isascii() and (c.isalnum() or c in "-_"))[:40]
    first = messages[0].id if messages else None
    thread = configurable.get("thread_id") or first
    kind = "/".join([*places, name])
    if places[-1:] == [named]:
        return f"{name}-{print_of([thread, above[:-1], named, first])}", kind, len(above) > 1
    return f"{name}-{print_of([thread, above])}", kind, bool(above)
