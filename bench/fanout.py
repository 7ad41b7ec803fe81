"""Eight agents at once on one shared prefix: through the proxy with a pool, against the unpatched engine with its defaults.

Each agent asks its own short question under the same system prompt and gets 16 tokens. Both engines have eight slots, the same
context a slot, and are started anew and warmed up by an unrelated prompt for every round; rounds alternate. Making the pool counts
into our wall time. The unpatched engine keeps its RAM cache and its reuse by similar prompts; what that saves stands beside ours.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx

from bench.kit.report import Report
from bench.kit.rig import GREEDY, Options, run, stock, tokens
from bench.kit.stats import estimate
from bench.kit.wire import Wire
from tests.engine.driver import KEY, Engine
from tests.fakes.proxy_process import Served
from tests.models import smollm2, tiny_model

CHAT = "/v1/chat/completions"
N_ANSWER = 16
ARGS: list[str | int] = ["-c", 8192, "-np", 8, "-t", 1]
QUESTIONS = [
    "How many tools may I borrow at once?",
    "When is the library open?",
    "What does membership cost a student?",
    "Who pays for a broken drill?",
    "Where are the ladders kept?",
    "How long may I keep a saw?",
    "May a friend bring my tools back?",
    "What must I do before I use a sander?",
]
SYSTEM = """You answer questions about the tool library of Harbour Street.
Members borrow up to four tools at a time for seven days and may renew a loan once, unless somebody else is waiting for the tool.
Power tools need a short introduction, which takes place every Tuesday at six in the evening; hand tools do not.
Bring tools back clean and dry. A late tool costs fifty cents a day, at most ten euros. Broken tools are repaired together on the
first Saturday of the month, and nobody pays for wear. Membership is twenty euros a year, ten for students and people out of work.
The library is open on Tuesdays from four to eight and on Saturdays from ten to two. Drills, sanders and saws are kept on the left,
ladders at the back, garden tools in the shed, and the pressure washer must be booked by telephone because there is only one.
Anyone may bring back tools for a neighbour, but only the member who borrowed them can renew the loan. Children under fourteen come
with a grown-up and do not go into the workshop while a machine is running. Blades, bits and sandpaper are sold at cost price beside
the door. Whoever finds a fault writes it on the yellow card, ties the card to the tool, and puts it on the bench under the window.
The library lends no chainsaws, no welding gear and nothing that burns petrol. Questions about insurance go to the office upstairs.
Keys to the shed hang behind the desk and are handed out against a library card. Two volunteers are on duty at any time, and one of
them knows the machines. If a tool is missing from its place, look in the book first: it may be out on loan or waiting for repair.
Answer in one short sentence and say so when you do not know."""


@dataclass(frozen=True, slots=True)
class Agent:
    """What one agent was told it cost."""

    n_prompt: int
    n_computed: int
    n_cached: int
    n_answer: int
    ttft_s: float
    text: str

    @property
    def n_cells(self) -> int:
        """Cells that its tokens take when nothing is shared: the last token of an answer is never put into the cache."""
        return self.n_prompt + self.n_answer - 1


@dataclass(frozen=True, slots=True)
class Round:
    """One side's round. `n_prefix` is 0 without a pool; `cells_used` and `n_counted` are what the engine itself says."""

    wall_s: float
    agents: list[Agent]
    pool_s: float = 0.0
    n_prefix: int = 0
    cells_used: int = 0
    slot_cells: int = 0
    n_counted: int = 0

    @property
    def n_prefilled(self) -> int:
        return self.n_prefix + sum(agent.n_computed for agent in self.agents)

    @property
    def n_reused(self) -> int:
        return sum(agent.n_cached for agent in self.agents)

    @property
    def cells_expected(self) -> int:
        """P + Σ private suffixes, from what the clients were told."""
        return self.n_prefix + sum(agent.n_cells - self.n_prefix for agent in self.agents)


def measure(report: Report, options: Options) -> None:
    """Rounds in turns (ours, stock, stock, ours, …), the table, the goals."""
    pooled, stocks = in_turns(report, options, {"pooled": pooled_round, "stock": stock_round})
    show(report, pooled, stocks)
    judge(report, pooled)


def in_turns(report: Report, options: Options, sides: dict[str, Callable[[Options, Path], Any]]) -> list[list[Any]]:
    """The rounds of each side: one on the tiny model when it has to be quick, else three on the real one."""
    model, n_rounds = (tiny_model("full"), 1) if options.quick else (smollm2(), 3)
    rounds: dict[str, list[Any]] = {side: [] for side in sides}
    for number in range(n_rounds):
        for side in list(sides) if number % 2 == 0 else list(reversed(sides)):
            done = sides[side](options, model)
            rounds[side].append(done)
            report.say(f"round {number + 1}, {side}: {done.wall_s:.2f} s, {done.n_prefilled} prompt tokens computed")
    return list(rounds.values())


def pooled_round(options: Options, model: Path) -> Round:
    """A pool of the system prompt, made within the measured time, and all agents attached to it."""
    with (
        tempfile.TemporaryDirectory(prefix="polykv-bench-") as folder,
        Engine(options.engine, model, ARGS, max_pools=16) as engine,
        Served.before(engine.socket, KEY, Path(folder)) as served,
        httpx.Client(base_url=served.url, trust_env=False, timeout=600) as client,
    ):
        warm_up(engine)
        n_before = n_computed(engine)
        begin = time.perf_counter()
        pool = client.post("/polykv/pools", json={"messages": [{"role": "system", "content": SYSTEM}]}).raise_for_status().json()
        pool_s = time.perf_counter() - begin
        agents = ask_all(
            Wire(served.url), [{"pool_id": pool["pool_id"], "session_id": f"agent-{n}"} for n in range(len(QUESTIONS))]
        )
        wall_s = time.perf_counter() - begin
        state = settled(engine)
        served.stop()
    private = sum(slot["n_tokens"] - slot["n_shared"] for slot in state["slots"])
    counted = sum(slot["totals"]["n_prompt"] for slot in state["slots"]) - n_before
    n_prefix: int = pool["prefix_len"]
    return Round(wall_s, agents, pool_s, n_prefix, state["cells"]["used"], n_prefix + private, counted)


def stock_round(options: Options, model: Path) -> Round:
    """The same agents on the unpatched engine, at its own socket."""
    with stock(options.twin, model, ARGS) as engine:
        warm_up(engine)
        begin = time.perf_counter()
        agents = ask_all(Wire(engine.socket), [{} for _ in QUESTIONS])
        return Round(time.perf_counter() - begin, agents)


def warm_up(engine: Engine) -> None:
    """The model's pages are read and its buffers made; what that put into the cache is freed again where the engine can do it."""
    session = 10**6
    engine.completion(tokens(64, 1), 2, engine.attach_headers(session=session), cache_prompt=False)
    if engine.max_pools:
        engine.end_session(session)
        assert engine.used_cells() == 0


def n_computed(engine: Engine) -> int:
    return sum(slot["totals"]["n_prompt"] for slot in engine.state()["slots"])


def settled(engine: Engine) -> dict[str, Any]:
    """The state once every slot is idle: a reply leaves a moment before its slot is free."""
    while True:
        state = engine.state()
        if all(slot["state"] == "idle" for slot in state["slots"]):
            return state


def ask_all(wire: Wire, more: list[dict[str, Any]]) -> list[Agent]:
    """All questions at the same moment, each with the fields that it sends besides."""
    barrier = Barrier(len(QUESTIONS))

    def ask(number: int) -> Agent:
        barrier.wait()
        return ask_one(wire, QUESTIONS[number], more[number])

    with ThreadPoolExecutor(len(QUESTIONS)) as executor:
        return list(executor.map(ask, range(len(QUESTIONS))))


def ask_one(wire: Wire, question: str, more: dict[str, Any]) -> Agent:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {
        "messages": messages,
        "max_tokens": N_ANSWER,
        "stream": True,
        "stream_options": {"include_usage": True},
        **GREEDY,
        **more,
    }
    done = wire.post(CHAT, body)
    texts = [choice["delta"].get("content") or "" for event in done.events for choice in event["choices"]]
    first = next(n for n, event in enumerate(done.events) if any(choice["delta"].get("content") for choice in event["choices"]))
    timings, usage = (next(event[key] for event in reversed(done.events) if key in event) for key in ("timings", "usage"))
    return Agent(
        n_prompt=usage["prompt_tokens"],
        n_computed=timings["prompt_n"],
        n_cached=timings["cache_n"],
        n_answer=usage["completion_tokens"],
        ttft_s=done.arrivals[first],
        text="".join(texts),
    )


def show(report: Report, ours: list[Round], stocks: list[Round]) -> None:
    """Both sides, medians over the rounds, and the metrics."""
    speedup = estimate(stock.wall_s / our.wall_s for our, stock in zip(ours, stocks, strict=True))
    figures: list[tuple[str, str, float, float, int]] = [
        ("wall time", "wall_s", middle(ours, lambda r: r.wall_s), middle(stocks, lambda r: r.wall_s), 2),
        ("  of that making the pool", "pool_s", middle(ours, lambda r: r.pool_s), 0.0, 2),
        ("first token, median agent", "ttft_s", middle(ours, ttft), middle(stocks, ttft), 2),
        ("first token, last agent", "ttft_last_s", middle(ours, ttft_last), middle(stocks, ttft_last), 2),
        (
            "prompt tokens computed",
            "prefilled_tokens",
            middle(ours, lambda r: r.n_prefilled),
            middle(stocks, lambda r: r.n_prefilled),
            0,
        ),
        ("prompt tokens reused", "reused_tokens", middle(ours, lambda r: r.n_reused), middle(stocks, lambda r: r.n_reused), 0),
        ("cells for all agents", "cells", middle(ours, lambda r: r.cells_used), middle(stocks, lambda r: r.cells_expected), 0),
    ]
    for _, name, our, stock_, _ in figures:
        report.metric(f"pooled_{name}", our)
        report.metric(f"stock_{name}", stock_)
    report.metric("speedup", speedup.median)
    report.metric("prefix_tokens", ours[0].n_prefix)
    same = sum(our.text == stock_.text for our, stock_ in zip(ours[0].agents, stocks[0].agents, strict=True))
    report.metric("same_answers", same)
    rows = [[label, f"{our:.{digits}f}", f"{other:.{digits}f}"] for label, _, our, other, digits in figures]
    what = f"{len(QUESTIONS)} agents at once, shared prefix of {ours[0].n_prefix} tokens, {N_ANSWER} tokens of answer"
    title = f"{what} (s, tokens; medians of {len(ours)} rounds)"
    report.table(title, ["", "proxy and pool", "unpatched"], rows)
    report.say(f"\n  unpatched / pooled wall time: {speedup.show()}; {same} of {len(QUESTIONS)} answers are the same text")


def judge(report: Report, ours: list[Round]) -> None:
    """Exact counts, in the worst round: what the engine says against what the clients were told."""
    worst = max(ours, key=lambda r: abs(r.cells_used - r.cells_expected) + abs(r.slot_cells - r.cells_expected))
    report.exactly("cells_used", worst.cells_expected, worst.cells_used)
    report.exactly("cells_of_slots_and_pool", worst.cells_expected, worst.slot_cells)
    worst = max(ours, key=lambda r: abs(r.n_counted - r.n_prefilled))
    shared = worst.n_prefix + sum(agent.n_prompt - worst.n_prefix for agent in worst.agents)
    report.exactly("prefilled_tokens", shared, worst.n_counted)


def ttft(done: Round) -> float:
    return estimate(agent.ttft_s for agent in done.agents).median


def ttft_last(done: Round) -> float:
    return max(agent.ttft_s for agent in done.agents)


def middle(rounds: list[Round], value: Callable[[Round], float]) -> float:
    return estimate(map(value, rounds)).median


if __name__ == "__main__":
    run("fanout", __doc__, measure)
