"""The capacity gate: a node that fans out only as many workers as may start now.

Law: the gate has no effects before it interrupts, since a node runs again from its beginning on resume; each wait is a task of its
own, so there is one interrupt at a time. It reads a snapshot: racing graphs can still meet a 429, so workers keep a bounded wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import END, StateGraph
from langgraph.types import Command, Send, StateSnapshot, interrupt

from opencoti_langgraph.client import PoolClient
from opencoti_langgraph.errors import GateClosedError
from opencoti_langgraph.results import Capacity, PoolRef
from opencoti_langgraph.room import Ask, Patience, retry_after_s, seen, startable
from opencoti_langgraph.state import report_of

Mode = Literal["wait", "interrupt", "raise"]
SATURATED = "pool_saturated"
"""Type of our interrupts."""


class CapacityGate:
    """What a gate does. `capacity_gate` makes its node, `add_capacity_gate` wires it."""

    def __init__(
        self,
        client: PoolClient,
        *,
        todo: Callable[[Any], Sequence[Any]],
        worker: str = "worker",
        send: Callable[[Any, Any], Any] | None = None,
        done: str = END,
        name: str = "gate",
        mode: Mode = "wait",
        min_sessions: int = 1,
        fan_out: int | None = None,
        pool: PoolRef | Callable[[Any], PoolRef | None] | None = None,
        expected_tokens: int | None = None,
        patience: Patience | None = None,
    ) -> None:
        if mode not in {"wait", "interrupt", "raise"}:
            raise ValueError(f"mode is one of wait, interrupt and raise, not {mode!r}")
        self.client, self.todo, self.worker, self.done, self.name, self.mode = client, todo, worker, done, name, mode
        self._send = send or (lambda state, item: {"task": item, "pool_id": _get(state, "pool_id")})
        self._pool = pool
        self._wants = Ask(None, expected_tokens, min_sessions)
        self._fan_out = fan_out
        self._patience = patience or Patience()

    def ask(self, state: Any) -> Ask:
        """Whom this gate asks room for: its own pool, else the state's."""
        pool = self._pool(state) if callable(self._pool) else self._pool
        return replace(self._wants, pool=pool if self._pool is not None else _get(state, "pool_id"))

    def run(self, state: Any) -> Command[Any]:
        """The node."""
        if not self.todo(state):
            return Command(goto=self.done)
        ask = self.ask(state)
        return self._judge(state, self._patience.until(self.client, ask) if self.mode == "wait" else seen(self.client, ask))

    async def arun(self, state: Any) -> Command[Any]:
        """The node, without holding up the event loop."""
        if not self.todo(state):
            return Command(goto=self.done)
        ask = self.ask(state)
        if self.mode == "wait":
            return self._judge(state, await self._patience.auntil(self.client, ask))
        return self._judge(state, await asyncio.to_thread(seen, self.client, ask))

    def _judge(self, state: Any, capacity: Capacity) -> Command[Any]:
        n = startable(capacity)
        if n >= self._wants.min_sessions:
            return self._spawn(state, capacity, n if self._fan_out is None else min(n, self._fan_out))
        if self.mode == "raise":
            raise GateClosedError(f"no room: {capacity.reason or 'all slots are busy'}", report_of(capacity))
        told = {"type": SATURATED, "pool_id": self.ask(state).pool, "retry_after": retry_after_s(capacity)}
        interrupt({**told, "expected_tokens": self._wants.expected_tokens, "min_sessions": self._wants.min_sessions})
        return Command(goto=self.name)  # resumed: look again, as a task of its own

    def _spawn(self, state: Any, capacity: Capacity, n: int) -> Command[Any]:
        facts = {"capacity_ok": True, "headroom_sessions": n, "mean_active_tps": capacity.mean_active_tps}
        sends = [Send(self.worker, self._send(state, item)) for item in list(self.todo(state))[:n]]
        return Command(update={**facts, "capacity": report_of(capacity)}, goto=sends or self.done)


def capacity_gate(client: PoolClient, *, todo: Callable[[Any], Sequence[Any]], **options: Any) -> RunnableLambda[Any, Any]:
    """A node that sends as many items of `todo(state)` to `worker` as may start now, and comes again after they are done.

    Args:
        client: Of the proxy.
        todo: What is still to be done, of the state. Leave out what is done.
        options: `worker`, `done`, `name`: nodes. `send(state, item)`: a worker's input. `mode`: `wait` (bounded by `patience`),
            `interrupt` (needs a checkpointer; `resume_when_free` drives it) or `raise` (GateClosedError). `min_sessions`: room that
            must be there. `fan_out`: never more at once. `pool`: whose policy counts (the state's `pool_id` otherwise).
            `expected_tokens`: of each session, so that the context arm counts.
    """
    gate = CapacityGate(client, todo=todo, **options)
    return RunnableLambda(gate.run, afunc=gate.arun, name=gate.name)


def add_capacity_gate(builder: StateGraph[Any, Any, Any, Any], client: PoolClient, **options: Any) -> None:
    """Add a gate and the way back to it from the worker. The worker's node is yours."""
    gate = CapacityGate(client, **options)
    node = RunnableLambda(gate.run, afunc=gate.arun, name=gate.name)
    builder.add_node(gate.name, node, destinations=tuple({gate.name, gate.worker, gate.done}))
    builder.add_edge(gate.worker, gate.name)


def resume_when_free(graph: Any, config: RunnableConfig, client: PoolClient, *, patience: Patience | None = None) -> Any:
    """Drive a graph whose gate interrupts: ask until there is room, then resume, until no gate waits any more.

    Answers the graph's last output, or None when it did not wait. GateClosedError when there was no room in time.
    """
    result = None
    while waiting := _waiting(graph.get_state(config)):
        (patience or Patience()).until(client, _ask_of(waiting))
        result = graph.invoke(Command(resume=dict.fromkeys(waiting, True)), config)
    return result


async def aresume_when_free(graph: Any, config: RunnableConfig, client: PoolClient, *, patience: Patience | None = None) -> Any:
    """As `resume_when_free`."""
    result = None
    while waiting := _waiting(await graph.aget_state(config)):
        await (patience or Patience()).auntil(client, _ask_of(waiting))
        result = await graph.ainvoke(Command(resume=dict.fromkeys(waiting, True)), config)
    return result


def _waiting(snapshot: StateSnapshot) -> dict[str, dict[str, Any]]:
    """Our interrupts by id: several at once are resumed each by its own."""
    return {one.id: one.value for one in snapshot.interrupts if isinstance(one.value, dict) and one.value.get("type") == SATURATED}


def _ask_of(waiting: Mapping[str, Mapping[str, Any]]) -> Ask:
    told = next(iter(waiting.values()))
    return Ask(told["pool_id"], told["expected_tokens"], told["min_sessions"])


def _get(state: Any, key: str) -> Any:
    return state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)
