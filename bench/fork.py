"""Making, forking, attaching, snapshotting, saving and restoring a prefix, beside llama.cpp's own saving and restoring of a slot.

All at the engines' sockets, for several prefix lengths, in turns. What a fork and an attach cost beyond the one token that they
compute is their difference to `step`: the unpatched engine's slot, which holds the prefix, goes on by one token. The unpatched
engine has one way to give a second slot what the first one holds: save it to a file and restore that; `clone` is both together.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from bench.kit.report import Report
from bench.kit.rig import GREEDY, Options, cpu_s, run, stock, tokens
from bench.kit.stats import Estimate, best_ratio, differences, estimate, palindrome, pooled, ratios
from bench.kit.wire import Exchange, Wire
from tests.engine.driver import KEY, Engine
from tests.models import tiny_model

BOOKKEEPING_LIMIT_S = 0.005
GROWTH_LIMIT = 0.01
"""Flat: over the curve, each prefix token may add at most this part of what it costs to prefill one."""
LENGTHS = (64, 256, 1024, 2048, 4096, 8192)
OURS = ("attach", "fork", "snapshot", "save", "restore")
STOCK = ("step", "stock_save", "stock_restore")

Blocks = list[dict[str, list[float]]]
Timed = tuple[float, Callable[[], object]]
"""Seconds, and what makes everything as it was before (for later, untimed)."""


@dataclass(frozen=True, slots=True)
class Point:
    """All times at one prefix length, in seconds: of the caller, and of the engine's processor."""

    n_prefix: int
    blocks: Blocks
    busy: Blocks
    create: Estimate

    def of(self, side: str) -> Estimate:
        return estimate(pooled(self.blocks, side))

    def beyond_step(self, side: str) -> Estimate:
        return estimate(differences(self.blocks, side, "step"))

    def busy_beyond_step(self, side: str) -> Estimate:
        return estimate(differences(self.busy, side, "step"))

    def ratio(self, side: str, other: str) -> Estimate:
        return estimate(ratios(self.blocks, side, other))

    def best(self, side: str, other: str) -> float:
        return best_ratio(self.blocks, side, other)


class Prefix:
    """One prefix, held by a sequence of the patched engine and by the unpatched engine's slot 0. A method times one call."""

    numbers: ClassVar[count[int]] = count(10**6)
    """Of sessions, which are used once, and of prompts."""

    def __init__(self, twin: Engine, engine: Engine, folder: Path, n: int) -> None:
        self.engine, self.folder, self.tokens = engine, folder, tokens(n, n)
        self.wires = {"stock": Wire(twin.socket), "ours": Wire(engine.socket)}
        self.pids = {side: (engine if side in OURS else twin).process.pid for side in (*OURS, *STOCK)}
        self.seq = engine.materialise(self.tokens)
        for make in (self.step, self.save, self.stock_save):  # what later calls go on with
            make()

    def ours(self, path: str, body: dict[str, Any], **attached: Any) -> Exchange:
        return self.wires["ours"].post(path, body, {"x-polykv-key": KEY, **self.engine.attach_headers(**attached)})

    def next_prompt(self) -> list[int]:
        """The prefix and one token that no prompt before went on with."""
        return [*self.tokens, 40001 + next(self.numbers) % 5000]

    def ask(self) -> dict[str, Any]:
        return {"prompt": self.next_prompt(), "n_predict": 1, "stream": True, **GREEDY}

    def step(self) -> Timed:
        done = self.wires["stock"].post("/completion", {"id_slot": 0, **self.ask()})
        return done.ttft_s, lambda: check("step", done.events[-1]["timings"]["cache_n"], len(self.tokens))

    def attach(self) -> Timed:
        session = next(self.numbers)
        done = self.ours("/completion", self.ask(), seq=self.seq, session=session)
        check("attach", int(done.headers["x-polykv-shared"]), len(self.tokens))
        return done.ttft_s, lambda: self.engine.end_session(session)

    def fork(self) -> Timed:
        """With one token of its own."""
        done = self.ours("/_polykv/v1/seqs", {"tokens": self.next_prompt(), "parent_seq": self.seq, "branch_pos": len(self.tokens)})
        check("fork", done.events[-1]["n_shared"], len(self.tokens))
        return done.total_s, lambda: self.engine.free(done.events[-1]["seq"])

    def snapshot(self) -> Timed:
        session = next(self.numbers)
        self.ours("/completion", self.ask(), seq=self.seq, session=session)
        done = self.ours("/_polykv/v1/seqs", {"session": session})
        check("snapshot", done.events[-1]["n_tokens"], len(self.tokens) + 1)

        def clean_up() -> None:
            self.engine.free(done.events[-1]["seq"])
            self.engine.end_session(session)

        return done.total_s, clean_up

    def save(self) -> Timed:
        return self.ours(f"/_polykv/v1/seqs/{self.seq}/save", {"path": str(self.folder / "ours")}).total_s, nothing

    def restore(self) -> Timed:
        done = self.ours("/_polykv/v1/seqs/restore", {"path": str(self.folder / "ours")})
        return done.total_s, lambda: self.engine.free(json.loads(done.body)["seq"])

    def stock_save(self) -> Timed:
        return self.wires["stock"].post("/slots/0?action=save", {"filename": "stock"}).total_s, nothing

    def stock_restore(self) -> Timed:
        done = self.wires["stock"].post("/slots/1?action=restore", {"filename": "stock"})
        return done.total_s, lambda: self.wires["stock"].post("/slots/1?action=erase", {})

    def create(self) -> float:
        done = self.ours("/_polykv/v1/seqs", {"tokens": tokens(len(self.tokens), next(self.numbers))})
        self.engine.free(done.events[-1]["seq"])
        return done.total_s


def nothing() -> None:
    """There is nothing to clean up."""


def check(what: str, n_reused: int, n_wanted: int) -> None:
    """A figure counts only where exactly the prefix was reused."""
    if n_reused != n_wanted:
        raise RuntimeError(f"{what} reused {n_reused} tokens instead of {n_wanted}: the comparison would be of something else")


def measure(report: Report, options: Options) -> None:
    """All lengths, the tables, the goals."""
    lengths, n_blocks, n_creates = ((64, 1024), 3, 1) if options.quick else (LENGTHS, 15, 5)
    report.say(f"tiny: prefixes of {', '.join(map(str, lengths))} tokens, {n_blocks} blocks each")
    with engines(options, max(lengths)) as (twin, engine), tempfile.TemporaryDirectory(dir=twin.folder.name) as folder:
        points = [measure_point(Prefix(twin, engine, Path(folder), n), n_blocks, n_creates) for n in lengths]
    show(report, points)
    judge(report, points)


@contextmanager
def engines(options: Options, n_longest: int) -> Iterator[tuple[Engine, Engine]]:
    """Both, with two slots, and room for the prefix, a copy, and what is measured."""
    with tempfile.TemporaryDirectory(prefix="polykv-bench-") as saved:
        args: list[str | int] = ["-c", (3 * n_longest + 1024 + 255) // 256 * 256, "-np", 2, "-t", 1, "-kvu", "--cache-ram", 0]
        model = tiny_model("full")
        with (
            stock(options.twin, model, [*args, "--slot-save-path", saved]) as twin,
            Engine(options.engine, model, args) as engine,
        ):
            yield twin, engine


def measure_point(prefix: Prefix, n_blocks: int, n_creates: int) -> Point:
    """One length: all calls in turns. The first block warms up."""
    blocks, busies = [], []
    for _ in range(n_blocks + 1):
        block: dict[str, list[float]] = {side: [] for side in (*OURS, *STOCK)}
        busy: dict[str, list[float]] = {side: [] for side in block}
        for side in palindrome(list(block)):
            before = cpu_s(prefix.pids[side])
            seconds, clean_up = getattr(prefix, side)()
            busy[side].append(cpu_s(prefix.pids[side]) - before)
            block[side].append(seconds)
            clean_up()
        busies.append(busy)
        blocks.append(block | {"clone": [a + b for a, b in zip(block["stock_save"], block["stock_restore"], strict=True)]})
    creates = estimate(prefix.create() for _ in range(n_creates))
    prefix.engine.free(prefix.seq)
    return Point(len(prefix.tokens), blocks[1:], busies[1:], creates)


def show(report: Report, points: Sequence[Point]) -> None:
    """The tables and the metrics."""
    compared = (("fork", "clone"), ("attach", "step"), ("save", "stock_save"), ("restore", "stock_restore"))
    for point in points:
        n = point.n_prefix
        report.metric(f"create_ms_{n}", point.create.median * 1000)
        for side in (*OURS, *STOCK):
            report.metric(f"{side}_ms_{n}", point.of(side).median * 1000)
        for side in ("attach", "fork"):
            report.metric(f"{side}_bookkeeping_ms_{n}", point.beyond_step(side).median * 1000)
            report.metric(f"{side}_bookkeeping_cpu_ms_{n}", point.busy_beyond_step(side).median * 1000)
        for side, other in compared:
            report.metric(f"{side}_to_{other}_{n}", point.ratio(side, other).median)
    report.table(
        "whole calls (ms, medians)",
        ["prefix", "create", *OURS, *STOCK],
        [[p.n_prefix, ms(p.create), *(ms(p.of(side)) for side in (*OURS, *STOCK))] for p in points],
    )
    report.table(
        "beyond the token that is computed: more than `step` (ms, medians [95 % interval])",
        ["prefix", "attach", "fork", "attach, processor", "fork, processor"],
        [
            [p.n_prefix, *(scaled(of(side)) for of in (p.beyond_step, p.busy_beyond_step) for side in ("attach", "fork"))]
            for p in points
        ],
    )
    report.table(
        "ratios to the unpatched engine (medians [95 % interval], best)",
        ["prefix", *(f"{side} / {other}" for side, other in compared)],
        [[p.n_prefix, *(f"{p.ratio(*pair).show()}  {p.best(*pair):.2f}" for pair in compared)] for p in points],
    )


def judge(report: Report, points: Sequence[Point]) -> None:
    """Bookkeeping stays below 5 ms at every length and does not grow with it."""
    first, last = points[0], points[-1]
    n_more = last.n_prefix - first.n_prefix
    prefill = (last.create.median - first.create.median) / n_more
    for side in ("attach", "fork"):
        worst = max(point.beyond_step(side).median for point in points)
        report.at_most(f"{side}_bookkeeping_ms", BOOKKEEPING_LIMIT_S * 1000, worst * 1000)
        growth = (last.beyond_step(side).median - first.beyond_step(side).median) / n_more
        report.at_most(f"{side}_flat", GROWTH_LIMIT, growth / prefill)
    report.at_most("snapshot_ms", BOOKKEEPING_LIMIT_S * 1000, max(point.of("snapshot").median for point in points) * 1000)
    report.at_most("snapshot_flat", GROWTH_LIMIT, (last.of("snapshot").median - first.of("snapshot").median) / n_more / prefill)


def ms(value: Estimate) -> str:
    return f"{value.median * 1000:.2f}"


def scaled(value: Estimate) -> str:
    return Estimate(value.median * 1000, value.low * 1000, value.high * 1000, value.coverage, value.n).show()


if __name__ == "__main__":
    run("fork", __doc__, measure)
