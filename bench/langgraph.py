"""Eight LangChain agents at once on one shared context: our package and the proxy, against ChatOpenAI on the unpatched engine.

Each agent is `create_agent` with the same system prompt, and gets one short question. Ours have PoolMiddleware and
nothing else; making the pool counts into our wall time. The others have ChatOpenAI with its defaults on the unpatched engine with
its own, eight slots and RAM cache; what its own reuse of slots saves stands beside ours. Engines are started anew and warmed up by
an unrelated prompt for every round; rounds alternate.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI

from bench.fanout import ARGS, N_ANSWER, QUESTIONS, SYSTEM, in_turns, n_computed, settled, warm_up
from bench.kit.report import Report
from bench.kit.rig import Options, run, stock
from bench.kit.stats import estimate
from opencoti_langgraph import OpencotiChatModel, PoolClient, PoolMiddleware
from tests.engine.driver import KEY, Engine
from tests.fakes.proxy_process import Served

ASKED = {"temperature": 0, "seed": 1, "extra_body": {"ignore_eos": True}}


@dataclass(frozen=True, slots=True)
class Round:
    """One side's round. `n_prefix`: tokens of the pool; `n_counted`: what the engine itself counted, where it can."""

    wall_s: float
    replies: list[AIMessage]
    n_prefix: int = 0
    n_counted: int = 0

    @property
    def n_prompt(self) -> int:
        return sum(usage_of(reply)["input_tokens"] for reply in self.replies)

    @property
    def n_reused(self) -> int:
        return sum(usage_of(reply).get("input_token_details", {}).get("cache_read", 0) for reply in self.replies)

    @property
    def n_prefilled(self) -> int:
        return self.n_prefix + self.n_prompt - self.n_reused


def usage_of(reply: AIMessage) -> Any:
    return reply.usage_metadata or {"input_tokens": 0}


def measure(report: Report, options: Options) -> None:
    """Rounds in turns, the table, the goals."""
    os.environ["LANGSMITH_TRACING"] = "false"
    show(report, *in_turns(report, options, {"ours": our_round, "stock": stock_round}))


def our_round(options: Options, model: Path) -> Round:
    """PoolMiddleware makes the pool with the first agent's call, within the measured time; all agents attach to it."""
    with (
        tempfile.TemporaryDirectory(prefix="polykv-bench-") as folder,
        Engine(options.engine, model, ARGS, max_pools=16) as engine,
        Served.before(engine.socket, KEY, Path(folder)) as served,
        PoolClient(served.url) as client,
    ):
        warm_up(engine)
        n_before = n_computed(engine)
        chat = OpencotiChatModel(base_url=f"{served.url}/v1", max_tokens=N_ANSWER, **ASKED)
        pools = PoolMiddleware(client)
        begin = time.perf_counter()
        replies = asyncio.run(fleet(create_agent(chat, [], system_prompt=SYSTEM, middleware=[pools])))
        wall_s = time.perf_counter() - begin
        (pool,) = client.pools().pools
        n_counted = sum(slot["totals"]["n_prompt"] for slot in settled(engine)["slots"]) - n_before
        served.stop()
    return Round(wall_s, replies, pool.prefix_len or 0, n_counted)


def stock_round(options: Options, model: Path) -> Round:
    """The same agents with ChatOpenAI, at the unpatched engine's own socket."""
    http = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.split(".")[0])
    with stock(options.twin, model, ARGS) as engine:
        warm_up(engine)
        client = openai.DefaultAsyncHttpxClient(transport=http.AsyncHTTPTransport(uds=str(engine.socket)))
        chat = ChatOpenAI(
            base_url="http://engine/v1", api_key="none", model="any", http_async_client=client, max_tokens=N_ANSWER, **ASKED
        )

        async def served() -> list[AIMessage]:
            try:
                return await fleet(create_agent(chat, [], system_prompt=SYSTEM))
            finally:
                await client.aclose()

        begin = time.perf_counter()
        replies = asyncio.run(served())
        return Round(time.perf_counter() - begin, replies)


async def fleet(agent: Any) -> list[AIMessage]:
    """All agents at the same moment, each a thread of its own."""
    asks = [{"messages": [HumanMessage(question)]} for question in QUESTIONS]
    runs = [agent.ainvoke(ask, {"configurable": {"thread_id": f"agent-{n}"}}) for n, ask in enumerate(asks)]
    return [final["messages"][-1] for final in await asyncio.gather(*runs)]


def show(report: Report, ours: list[Round], stocks: list[Round]) -> None:
    """Both sides, medians over the rounds; counts are exact, in the worst round."""
    speedup = estimate(other.wall_s / our.wall_s for our, other in zip(ours, stocks, strict=True))
    figures: list[tuple[str, str, Callable[[Round], float], int]] = [
        ("wall time", "wall_s", lambda r: r.wall_s, 2),
        ("prompt tokens of all agents", "prompt_tokens", lambda r: r.n_prompt, 0),
        ("prompt tokens computed", "prefilled_tokens", lambda r: r.n_prefilled, 0),
        ("prompt tokens reused", "reused_tokens", lambda r: r.n_reused, 0),
    ]
    rows = []
    for label, name, value, digits in figures:
        our, other = (estimate(map(value, rounds)).median for rounds in (ours, stocks))
        report.metric(f"ours_{name}", our)
        report.metric(f"stock_{name}", other)
        rows.append([label, f"{our:.{digits}f}", f"{other:.{digits}f}"])
    report.metric("speedup", speedup.median)
    report.metric("prefix_tokens", ours[0].n_prefix)
    what = f"{len(QUESTIONS)} agents at once, shared prefix of {ours[0].n_prefix} tokens, {N_ANSWER} tokens of answer"
    report.table(f"{what} (s, tokens; medians of {len(ours)} rounds)", ["", "this package", "ChatOpenAI, unpatched"], rows)
    report.say(f"\n  unpatched / ours wall time: {speedup.show()}")
    worst = max(ours, key=lambda r: abs(r.n_counted - r.n_prefilled))
    suffixes = sum(usage_of(reply)["input_tokens"] - worst.n_prefix for reply in worst.replies)
    report.exactly("prefix_once_and_suffixes", worst.n_prefix + suffixes, worst.n_counted)
    report.at_least("speedup", 1.5, speedup.median)


if __name__ == "__main__":
    run("langgraph", __doc__, measure)
