"""Graphs that live in processes of their own, with a checkpointer on disk, and can be killed in the middle of any call.

Law: a life starts from its checkpoint, goes on to the end and writes down what was said. Death is SIGKILL, in one of three moments
of the n-th call that changes something: before it is sent, before it is answered, before the answer is seen.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

import httpx
from deepagents import create_deep_agent
from langchain.agents import create_agent
from langchain.agents.middleware.types import AgentMiddleware, AgentState
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph

from opencoti_langgraph import (
    BackpressureMiddleware,
    CompactionMiddleware,
    CompactionNode,
    CompactionState,
    OpencotiChatModel,
    PoolClient,
    PoolKeeper,
    PoolMiddleware,
    PoolNotFoundError,
    Trigger,
)
from opencoti_langgraph.state import latest
from tests.langgraph.sailing import dive

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])  # once imported, a life starts in milliseconds
MOMENTS = {
    "before": "http11.send_request_headers.started",
    "sent": "http11.send_request_body.complete",
    "answered": "http11.receive_response_body.complete",
}
"""When to die, in httpcore's words."""
SYSTEM = "You are a terse sailor who knows ships and harbours."
THREAD: Any = {"configurable": {"thread_id": "t"}}
N_TURNS = 4
ALWAYS = Trigger(pressure=0.0, min_messages=4)
KEEP = ("messages", 2)


@dataclass(frozen=True)
class Life:
    """One process after another in one folder: which graph, and when it dies (never, where `at` is 0)."""

    url: str
    folder: Path
    program: str
    at: int = 0
    moment: str = "sent"
    base_lease_s: float = 3600.0
    fork_lease_s: float = 300.0

    def start(self) -> Any:
        """The process, started."""
        process = PROCESSES.Process(target=live, args=(self,))
        process.start()
        return process

    def calls(self) -> list[str]:
        """The calls that changed something, of all lives in this folder."""
        return (self.folder / "calls").read_text().splitlines()

    def pid(self) -> int:
        """Of the process that lives now."""
        return int((self.folder / "pid").read_text())

    def told(self) -> dict[str, Any]:
        """What the life wrote down at its end: what was `said`, and the last reply's `pool_id` and `shared` tokens."""
        return json.loads((self.folder / "told.json").read_text())


class Mortal(httpx.BaseTransport):
    """A transport that counts calls which change something, and dies where it was told to."""

    def __init__(self, life: Life) -> None:
        self._life, self._n = life, 0
        self._real = httpx.HTTPTransport(verify=False)  # no certificates to load
        self._calls = os.open(life.folder / "calls", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method != "GET" and request.url.path.startswith("/polykv/") and request.url.path != "/polykv/match":
            os.write(self._calls, f"{request.method} {request.url.path}\n".encode())
            self._n += 1
            if self._n == self._life.at:
                request.extensions = {**request.extensions, "trace": self._trace}
        return self._real.handle_request(request)

    def _trace(self, name: str, _info: object) -> None:
        if name == MOMENTS[self._life.moment]:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self._real.close()
        os.close(self._calls)


def live(life: Life) -> None:
    """Go on from the checkpoint to the end."""
    (life.folder / "pid").write_text(str(os.getpid()))
    model = OpencotiChatModel(base_url=f"{life.url}/v1", model="toy", max_tokens=6, temperature=0, n_ctx=4096)
    with (
        httpx.Client(base_url=life.url, transport=Mortal(life), timeout=None) as http,
        SqliteSaver.from_conn_string(str(life.folder / "checkpoints.sqlite")) as saver,
    ):
        keeper = PoolKeeper(PoolClient(http_client=http), base_lease_s=life.base_lease_s, fork_lease_s=life.fork_lease_s)
        messages = PROGRAMS[life.program](model, keeper, saver)
    facts = messages[-1].response_metadata
    told = {"said": [_said(one) for one in messages], "pool_id": facts["pool_id"], "shared": facts["cached_prefix_tokens"]}
    (life.folder / "told.json").write_text(json.dumps(told))


def _said(message: BaseMessage) -> list[Any]:
    calls = [(call["name"], call["args"]) for call in getattr(message, "tool_calls", [])]
    return [message.type, message.text, calls]


class Counted(AgentState[Any]):
    """With the number of turns that were asked."""

    turn: NotRequired[int]


class Counting(AgentMiddleware[Any, Any, Any]):
    """Brings the channel."""

    state_schema = Counted


def conversation(graph: Any) -> list[BaseMessage]:
    """What is left of `N_TURNS` turns."""
    while (turn := finished(graph).get("turn", 0)) < N_TURNS:
        graph.invoke({"messages": [HumanMessage(f"turn {turn}")], "turn": turn + 1}, THREAD)
    return finished(graph)["messages"]


def once(graph: Any, text: str) -> list[BaseMessage]:
    """A single turn."""
    if not finished(graph).get("messages"):
        graph.invoke({"messages": [HumanMessage(text)]}, THREAD)
    return finished(graph)["messages"]


def finished(graph: Any) -> dict[str, Any]:
    """The state, after what was broken off has run to its end. `next` would not do: it leaves out tasks whose writes are saved."""
    if graph.get_state(THREAD).tasks:
        graph.invoke(None, THREAD)
    return graph.get_state(THREAD).values


def agent(model: OpencotiChatModel, keeper: PoolKeeper, saver: SqliteSaver) -> list[BaseMessage]:
    """An agent whose history is compacted again and again."""
    pools = PoolMiddleware(keeper)
    compaction = CompactionMiddleware(model, pools, trigger=ALWAYS, keep=KEEP)
    middleware = [Counting(), compaction, BackpressureMiddleware(), pools]
    return conversation(create_agent(model, [dive], system_prompt=SYSTEM, middleware=middleware, checkpointer=saver))


def node(model: OpencotiChatModel, keeper: PoolKeeper, saver: SqliteSaver) -> list[BaseMessage]:
    """A plain graph with a CompactionNode."""

    class State(CompactionState, total=False):
        turn: Annotated[int, latest]

    def ask(state: Any) -> dict[str, Any]:
        pool = {"pool_id": state["pool_id"]} if state.get("pool_id") else {}
        return {"messages": [model.invoke([SystemMessage(SYSTEM), *state["messages"]], session_id="node", **pool)]}

    builder = StateGraph(State)
    builder.add_node("compact", CompactionNode(model, keeper, system=SYSTEM, trigger=ALWAYS, keep=KEEP)).add_node("ask", ask)
    return conversation(builder.add_edge(START, "compact").add_edge("compact", "ask").compile(checkpointer=saver))


def forks(model: OpencotiChatModel, keeper: PoolKeeper, saver: SqliteSaver) -> list[BaseMessage]:
    """A deep agent that gives out two tasks at once to children that go on from a fork of its pool."""
    helper: Any = {"name": "helper", "description": "helps", "mode": "fork"}
    middleware = [PoolMiddleware(keeper)]
    graph = create_deep_agent(model, system_prompt=SYSTEM, middleware=middleware, subagents=[helper], checkpointer=saver)
    return once(graph, "delegate")


def by_hand(model: OpencotiChatModel, keeper: PoolKeeper, saver: SqliteSaver) -> list[BaseMessage]:
    """Nodes that make, fork and compact pools themselves, in both ways that the client has."""

    class State(CompactionState, total=False):
        base: Annotated[int, latest]
        story: Annotated[str, latest]

    client, head = keeper.client, {"role": "system", "content": SYSTEM}

    def prefix(text: str) -> list[dict[str, str]]:
        return [head, {"role": "user", "content": text}]

    def begin(_: Any) -> dict[str, Any]:
        base = client.create_pool(messages=[head], name="base", ttl_s=keeper.base_lease_s)
        fork = client.fork_pool(base.pool_id, messages=prefix("the long story"), name="long", ttl_s=keeper.fork_lease_s)
        return {"base": base.pool_id, "pool_id": fork.pool_id, "story": "the long story"}

    def ask(state: Any) -> dict[str, Any]:
        prompt = [SystemMessage(SYSTEM), HumanMessage(state["story"]), *state["messages"][1:]]
        return {"messages": [model.invoke(prompt, pool_id=state["pool_id"])]}

    def refork(state: Any) -> dict[str, Any]:
        short = {"messages": prefix("the short story"), "name": "short", "ttl_s": keeper.fork_lease_s}
        done = client.compact_by_refork(state["pool_id"], ancestor=state["base"], **short)
        return {"pool_id": done.pool.pool_id, "story": "the short story"}

    def compact(state: Any) -> dict[str, Any]:
        try:
            pool = client.pool("tiny")  # made by an earlier life
        except PoolNotFoundError:
            pool = client.compact_pool(state["pool_id"], messages=prefix("a story"), name="tiny", ttl_s=keeper.fork_lease_s)
        return {"pool_id": pool.pool_id, "story": "a story"}

    builder = StateGraph(State).add_node("begin", begin).add_node("refork", refork).add_node("compact", compact)
    for name in ("ask", "ask_again", "ask_last"):
        builder.add_node(name, ask)
    for one, other in zip([START, *(way := ["begin", "ask", "refork", "ask_again", "compact", "ask_last"])], way, strict=False):
        builder.add_edge(one, other)
    return once(builder.compile(checkpointer=saver), "tell on")


Program = Callable[[OpencotiChatModel, PoolKeeper, SqliteSaver], list[BaseMessage]]
PROGRAMS: dict[str, Program] = {"agent": agent, "node": node, "forks": forks, "by_hand": by_hand}
