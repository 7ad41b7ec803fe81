"""Time to the first token: an attached request against a stock slot that already holds the same prefix.

Three sides take turns in one run, for several prefix lengths: the unpatched engine whose only slot holds the prefix (`stock`), the
patched engine asked at its own socket to attach a pool (`engine`: the mechanism), and the same through the proxy (`proxy`: the
product). Every request brings the same number of new tokens; `stock` continues its slot, the others find an empty one. Beside them:
the same prompt without any cache, and whole snapshot and fork calls.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from bench.kit.report import Report
from bench.kit.rig import GREEDY, Options, cpu_s, run, stock, tokens
from bench.kit.stats import Estimate, best_ratio, differences, estimate, palindrome, pooled, ratios
from bench.kit.wire import Exchange, Wire
from tests.engine.driver import KEY, Engine
from tests.fakes.proxy_process import Served
from tests.models import smollm2, tiny_model

RATIO_LIMIT = 1.15
BOOKKEEPING_LIMIT_S = 0.005
GROWTH_LIMIT = 0.01
"""Flat: over the curve, each prefix token may add at most this part of what it costs to prefill one."""
N_SUFFIX = 16
"""New tokens of a request: a short question."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One model's curve. `n_fresh` prompts are also computed without any cache."""

    model: str
    path: Path
    lengths: Sequence[int]
    n_blocks: int
    n_calls: int
    n_fresh: int
    real: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """One prefix: a sequence of the engine, and a pool of the proxy in the engine behind that."""

    tokens: list[int]
    seed: int
    seq: str
    pool_id: int

    def __len__(self) -> int:
        return len(self.tokens)


Blocks = list[dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class Point:
    """All figures at one prefix length, in seconds."""

    n_prefix: int
    ttft_s: Blocks
    busy_s: Blocks
    fresh: float
    snapshot: Estimate
    proxy_snapshot: Estimate
    fork: Estimate

    def ratio(self, side: str) -> Estimate:
        return estimate(ratios(self.ttft_s, side, "stock"))

    def added(self, side: str) -> Estimate:
        return estimate(differences(self.ttft_s, side, "stock"))

    def best(self, side: str) -> float:
        return best_ratio(self.ttft_s, side, "stock")

    def added_cpu(self, side: str) -> Estimate:
        return estimate(differences(self.busy_s, side, "stock"))

    def ttft(self, side: str) -> float:
        return estimate(pooled(self.ttft_s, side)).median


class Rig:
    """An engine for each side, with one slot, so that it is known where a request goes, and with the prefix once: resident cells
    cost time. The proxy has an engine of its own: it listens to that one's events, which the side without a proxy should not feel.
    """

    def __init__(self, twin: Engine, engine: Engine, behind: Engine, served: Served, client: httpx.Client) -> None:
        self.engine, self.client = engine, client
        self.wires = {"stock": Wire(twin.socket), "engine": Wire(engine.socket), "proxy": Wire(served.url)}
        self.pids = {"stock": [twin.process.pid], "engine": [engine.process.pid], "proxy": [behind.process.pid, served.process.pid]}
        self.numbers = count(1)

    def busy_s(self, side: str) -> float:
        """Processor time so far of all processes that work for a side."""
        return sum(map(cpu_s, self.pids[side]))

    def ask(self, side: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Exchange:
        """A greedy request for one token."""
        return self.wires[side].post("/completion", {"n_predict": 1, "stream": True, **GREEDY, **body}, headers)

    def prompt(self, shared: Shared) -> list[int]:
        """The prefix and new tokens that no earlier prompt goes on with."""
        return [*shared.tokens, 40001 + next(self.numbers) % 5000, *tokens(N_SUFFIX - 1, 1000 + shared.seed)]

    def next_session(self) -> int:
        return 10**6 + next(self.numbers)

    def keyed(self, **more: Any) -> dict[str, str]:
        return {"x-polykv-key": KEY} | self.engine.attach_headers(**more)


def measure(report: Report, options: Options) -> None:
    """Every plan, its tables and its goals."""
    for plan in plans(options.quick):
        lengths = ", ".join(map(str, plan.lengths))
        report.say(f"{plan.model}: {N_SUFFIX} new tokens after {lengths} shared ones, {plan.n_blocks} blocks each")
        with rig(options, plan) as running:
            points = [measure_point(running, plan, n_prefix, seed) for seed, n_prefix in enumerate(plan.lengths)]
        show(report, plan, points)
        judge(report, plan, points)


def plans(quick: bool) -> list[Plan]:
    """Curves on a tiny model, where nothing hides bookkeeping; a real one at two lengths."""
    if quick:
        return [Plan("tiny", tiny_model("full"), (64, 1024), 4, 4, 1)]
    return [
        Plan("tiny", tiny_model("full"), (64, 256, 1024, 2048, 4096, 8192), 25, 15, 3),
        Plan("smollm2", smollm2(), (256, 1000), 24, 10, 1, real=True),
    ]


@contextmanager
def rig(options: Options, plan: Plan) -> Iterator[Rig]:
    """Everything running and warm."""
    n_ctx = (2 * max(plan.lengths) + 1024 + 255) // 256 * 256
    args: list[str | int] = ["-c", n_ctx, "-np", 1, "-t", 1, "-kvu", "--cache-ram", 0]
    with (
        tempfile.TemporaryDirectory(prefix="polykv-bench-") as folder,
        stock(options.twin, plan.path, args) as twin,
        Engine(options.engine, plan.path, args) as engine,
        Engine(options.engine, plan.path, args) as behind,
        Served.before(behind.socket, KEY, Path(folder)) as served,
        httpx.Client(base_url=served.url, trust_env=False, timeout=600) as client,
    ):
        running = Rig(twin, engine, behind, served, client)
        for side in palindrome(list(running.wires)):
            running.ask(side, {"prompt": tokens(64, 10**6), "cache_prompt": False})
        yield running
        served.stop()


def measure_point(rig: Rig, plan: Plan, n_prefix: int, seed: int) -> Point:
    """One length: the pool and the stock slot are filled first, untimed; then the sides in turns, then the calls."""
    prefix = tokens(n_prefix, seed)
    made = rig.client.post("/polykv/pools", json={"tokens": prefix}).raise_for_status().json()
    shared = Shared(prefix, seed, rig.engine.materialise(prefix), made["pool_id"])
    fresh = [rig.ask("stock", {"prompt": rig.prompt(shared), "cache_prompt": False}).ttft_s for _ in range(plan.n_fresh)]
    sides = {"stock": ask_stock, "engine": ask_engine, "proxy": ask_proxy}
    ttft_s, busy_s = [], []
    for _ in range(plan.n_blocks + 1):
        ttft: dict[str, list[float]] = {side: [] for side in sides}
        busy: dict[str, list[float]] = {side: [] for side in sides}
        for side in palindrome(list(sides)):
            before = rig.busy_s(side)
            done, clean_up = sides[side](rig, shared)
            busy[side].append(rig.busy_s(side) - before)
            ttft[side].append(done.ttft_s)
            clean_up()
        ttft_s.append(ttft)
        busy_s.append(busy)
    calls = [estimate(call(rig, shared) for _ in range(plan.n_calls)) for call in (snapshot, proxy_snapshot, fork)]
    rig.engine.free(shared.seq)
    rig.client.delete(f"/polykv/pools/{shared.pool_id}").raise_for_status()
    return Point(n_prefix, ttft_s[1:], busy_s[1:], estimate(fresh).median, *calls)


Asked = tuple[Exchange, Callable[[], object]]
"""A request that reused exactly the prefix, and what makes its slot empty again (for later, untimed)."""


def ask_stock(rig: Rig, shared: Shared) -> Asked:
    done = rig.ask("stock", {"prompt": rig.prompt(shared)})
    check("the stock slot", done.events[-1]["timings"]["cache_n"], len(shared))
    return done, lambda: None


def ask_engine(rig: Rig, shared: Shared, session: int = 0) -> Asked:
    session = session or rig.next_session()
    done = rig.ask("engine", {"prompt": rig.prompt(shared)}, rig.keyed(seq=shared.seq, session=session))
    check("the engine", int(done.headers["x-polykv-shared"]), len(shared))
    return done, lambda: rig.engine.end_session(session)


def ask_proxy(rig: Rig, shared: Shared, session: str = "") -> Asked:
    session = session or f"bench-{rig.next_session()}"
    done = rig.ask("proxy", {"prompt": rig.prompt(shared), "pool_id": shared.pool_id, "session_id": session})
    check("the proxy", int(done.headers["x-cached-prefix-tokens"]), len(shared))
    return done, lambda: rig.client.delete(f"/polykv/sessions/{session}").raise_for_status()


def check(who: str, n_reused: int, n_prefix: int) -> None:
    """A figure counts only where the whole prefix was reused and nothing else."""
    if n_reused != n_prefix:
        raise RuntimeError(f"{who} reused {n_reused} tokens instead of {n_prefix}: the comparison would be of something else")


def snapshot(rig: Rig, shared: Shared) -> float:
    """The whole of `POST seqs` for a session that holds the prefix and a suffix."""
    session = rig.next_session()
    _, end = ask_engine(rig, shared, session)
    done = rig.wires["engine"].post("/_polykv/v1/seqs", {"session": session}, rig.keyed())
    rig.engine.free(done.events[-1]["seq"])
    end()
    return done.total_s


def proxy_snapshot(rig: Rig, shared: Shared) -> float:
    """The whole of `POST /polykv/pools` with `from_session`: names, index and journal included."""
    session = f"bench-{rig.next_session()}"
    _, end = ask_proxy(rig, shared, session)
    done = rig.wires["proxy"].post("/polykv/pools", {"from_session": session})
    rig.client.delete(done.headers["location"]).raise_for_status()
    end()
    return done.total_s


def fork(rig: Rig, shared: Shared) -> float:
    """The whole of `POST seqs` with a parent and one token of its own, whose computing is included."""
    body = {"tokens": rig.prompt(shared)[: len(shared) + 1], "parent_seq": shared.seq, "branch_pos": len(shared)}
    done = rig.wires["engine"].post("/_polykv/v1/seqs", body, rig.keyed())
    check("the fork", done.events[-1]["n_shared"], len(shared))
    rig.engine.free(done.events[-1]["seq"])
    return done.total_s


def show(report: Report, plan: Plan, points: list[Point]) -> None:
    """Both tables of a model, and the metrics."""
    rows, busy, calls = [], [], []
    for point in points:
        name = f"{plan.model}_{point.n_prefix}"
        rows.append([point.n_prefix, ms(point.fresh), *(ms(point.ttft(side)) for side in ("stock", "engine", "proxy"))])
        for side in ("engine", "proxy"):
            rows[-1] += [point.ratio(side).show(), f"{point.best(side):.2f}", scaled(point.added(side))]
            report.metric(f"{side}_ratio_{name}", point.ratio(side).median)
            report.metric(f"{side}_best_ratio_{name}", point.best(side))
            report.metric(f"{side}_added_ms_{name}", point.added(side).median * 1000)
            report.metric(f"{side}_added_cpu_ms_{name}", point.added_cpu(side).median * 1000)
        for side in ("stock", "engine", "proxy"):
            report.metric(f"{side}_ttft_ms_{name}", point.ttft(side) * 1000)
        report.metric(f"fresh_ttft_ms_{name}", point.fresh * 1000)
        for kind, value in (("snapshot", point.snapshot), ("proxy_snapshot", point.proxy_snapshot), ("fork", point.fork)):
            report.metric(f"{kind}_ms_{name}", value.median * 1000)
        busy.append([point.n_prefix, *(scaled(point.added_cpu(side)) for side in ("engine", "proxy"))])
        calls.append([point.n_prefix, *map(scaled, (point.snapshot, point.proxy_snapshot, point.fork))])
    head = ["prefix", "no cache", "stock slot", "engine", "proxy", "engine/stock", "best", "adds", "proxy/stock", "best", "adds"]
    report.table(f"{plan.model}: time to the first token (ms, medians [95 % interval])", head, rows)
    report.table(
        f"{plan.model}: processor time more than the stock slot's (ms)", ["prefix", "engine adds", "engine + proxy add"], busy
    )
    report.table(
        f"{plan.model}: whole calls (ms, medians [95 % interval])",
        ["prefix", "snapshot, engine", "pool from_session, proxy", "fork + 1 token, engine"],
        calls,
    )


def judge(report: Report, plan: Plan, points: list[Point]) -> None:
    """The ratio at the engine at every length, and through the proxy where a step costs what a real model's costs. What an attach
    adds is judged on the tiny model (a real one's steps vary by more than that). Nothing may grow with the prefix.
    """
    first, last = points[0], points[-1]
    n_more = last.n_prefix - first.n_prefix
    prefill = (last.fresh - first.fresh) / n_more
    for side in ("engine", "proxy"):
        if side == "engine" or plan.real:
            report.at_most(f"{side}_ratio_{plan.model}", RATIO_LIMIT, max(point.ratio(side).median for point in points))
        if not plan.real:
            added = max(point.added(side).median for point in points)
            report.at_most(f"{side}_attach_ms_{plan.model}", BOOKKEEPING_LIMIT_S * 1000, added * 1000)
        growth = (last.added(side).median - first.added(side).median) / n_more
        report.metric(f"{side}_added_us_per_1000_tokens_{plan.model}", growth * 1e9)
        report.at_most(f"{side}_flat_{plan.model}", GROWTH_LIMIT, growth / prefill)
    report.at_most(f"snapshot_flat_{plan.model}", GROWTH_LIMIT, (last.snapshot.median - first.snapshot.median) / n_more / prefill)
    report.at_most(f"snapshot_ms_{plan.model}", BOOKKEEPING_LIMIT_S * 1000, max(point.snapshot.median for point in points) * 1000)


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"


def scaled(value: Estimate) -> str:
    return Estimate(value.median * 1000, value.low * 1000, value.high * 1000, value.coverage, value.n).show()


if __name__ == "__main__":
    run("attach", __doc__, measure)
