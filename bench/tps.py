"""Tokens per second as the proxy says, against a clock outside: 1, 2, 4 and 8 streams at once, plain and with n-gram drafts.

Each stream is a session with a client of its own, whose clock takes the arrival of every token. Compared are the pace of the whole
turn (`tps_last_turn`) and, during the run, each `tps_ewma` that `/polykv/tps` tells with the same average over the arrivals so far.
Beside it: what the engine's counters cost its decode speed, with and without a reader, in palindromes.
"""

from __future__ import annotations

import json
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import httpx

from bench.kit.report import Report
from bench.kit.rig import GREEDY, Options, cpu_s, run, tokens
from bench.kit.stats import best_ratio, estimate, palindrome, ratios
from bench.kit.wire import Exchange, Wire
from polykv_proxy.core.pace import Pace
from tests.engine.driver import KEY, Engine
from tests.fakes.proxy_process import Served
from tests.models import smollm2, tiny_model

ERROR_LIMIT = 0.02
RATIO_LIMIT = 0.99
ARGS: list[str | int] = ["-c", 16384, "-np", 8, "-t", 1, "-kvu", "--cache-ram", 0]
NGRAM: list[str | int] = [
    "--spec-type",
    "ngram-mod",
    "--spec-ngram-mod-n-match",
    8,
    "--spec-ngram-mod-n-min",
    1,
    "--spec-ngram-mod-n-max",
    8,
]
DRAFTS = {"plain": [], "ngram": [*NGRAM, "--spec-ngram-mod-n-max", 8]}
SETTLED_S = 1.0
"""A live figure is judged once its stream has run that long: before, both averages are of a handful of tokens."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One model: tokens of an answer, numbers of streams and turns for each of them, palindromes for the cost of the counters."""

    model: str
    path: Path
    n_answer: int
    streams: Sequence[int]
    n_turns: int
    n_blocks: int


@dataclass(frozen=True, slots=True)
class Clock:
    """One stream as its client saw it: when tokens came, and how many at a time."""

    times: list[float]
    counts: list[int]

    @classmethod
    def of(cls, done: Exchange) -> Clock:
        """What came in one read of the socket came at once."""
        came: dict[float, int] = {}
        for at, event in zip(done.arrivals, done.events, strict=True):
            came[at] = came.get(at, 0) + len(event.get("tokens", ()))
        found = [(done.began + at, n) for at, n in came.items() if n]
        return cls([at for at, _ in found], [n for _, n in found])

    @property
    def tps(self) -> float:
        """Tokens after the first arrival by the time since it."""
        return sum(self.counts[1:]) / (self.times[-1] - self.times[0])

    def ewma(self, until: float) -> float | None:
        """The proxy's average over what had come by then; None where that says little, or the stream was over."""
        if not self.times[0] + SETTLED_S <= until <= self.times[-1]:
            return None
        pace, last = Pace(), self.times[0]
        for at, n in zip(self.times[1:], self.counts[1:], strict=True):
            if at > until:
                break
            pace, last = pace.after(n, at - last), at
        return pace.value


def measure(report: Report, options: Options) -> None:
    """Accuracy with and without drafts, then the cost."""
    for plan in plans(options.quick):
        rows = []
        for drafts, args in DRAFTS.items():
            with proxied(options, plan, args) as url:
                stream(url, plan.n_answer, "warm")
                rows += [accuracy(report, plan, drafts, url, n) for n in plan.streams]
        report.table(
            f"{plan.model}: {plan.n_answer} tokens a stream; error of ours against the clock outside, median (largest)",
            ["streams", "tokens/s outside", "turn", "live", "live samples", "drafts accepted"],
            rows,
        )
        cost(report, options, plan)


def plans(quick: bool) -> list[Plan]:
    if quick:
        return [Plan("tiny", tiny_model("full"), 256, [1, 2], 2, 2)]
    return [Plan("tiny", tiny_model("full"), 3000, [1, 2, 4, 8], 8, 40), Plan("smollm2", smollm2(), 96, [1, 2, 4, 8], 8, 10)]


@contextmanager
def proxied(options: Options, plan: Plan, args: list[str | int]) -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="polykv-bench-") as folder,
        Engine(options.engine, plan.path, [*context(plan), *args]) as engine,
        Served.before(engine.socket, KEY, Path(folder)) as served,
    ):
        yield served.url
        served.stop()


def context(plan: Plan) -> list[str | int]:
    """Room for eight whole streams."""
    return ["-c", 8 * (plan.n_answer + 256), *ARGS[2:]]


# -- accuracy -------------------------------------------------------------------------------------------------------------


def accuracy(report: Report, plan: Plan, drafts: str, url: str, n: int) -> list[object]:
    """`n` streams at once, until there were `plan.n_turns` of them: one row of the table."""
    turn: list[float] = []
    live: list[float] = []
    outside: list[float] = []
    accepted = 0
    while len(turn) < plan.n_turns:
        with Watcher(url) as watcher, ThreadPoolExecutor(n) as pool:
            names = [f"{drafts}-{n}-{len(turn) + i}" for i in range(n)]
            done = dict(zip(names, pool.map(lambda name: stream(url, plan.n_answer, name), names), strict=True))
            ours = turns(url, names)
        clocks = {name: Clock.of(exchange) for name, exchange in done.items()}
        turn += [abs(ours[name] / clock.tps - 1) for name, clock in clocks.items()]
        seen = [(tps, clocks[name].ewma(at)) for at, name, tps in watcher.seen if name in clocks]
        live += [abs(tps / known - 1) for tps, known in seen if known is not None]
        outside.append(sum(clock.tps for clock in clocks.values()))
        accepted += sum(exchange.events[-1]["timings"].get("draft_n_accepted", 0) for exchange in done.values())
    label = f"{plan.model}_{drafts}_{n}"
    report.at_most(f"turn_error_{label}", ERROR_LIMIT, median(turn))
    if live:
        report.at_most(f"live_error_{label}", ERROR_LIMIT, median(live))
    if drafts == "ngram":
        report.holds(f"drafts_{label}", "some are accepted", accepted > 0)
    report.metric(f"live_samples_{label}", len(live))
    report.metric(f"outside_tps_{label}", median(outside))
    return [f"{n} {drafts}", f"{median(outside):.1f}", shown(turn), shown(live), len(live), accepted]


def shown(errors: list[float]) -> str:
    return f"{median(errors):.2%} ({max(errors):.2%})" if errors else "-"


def stream(url: str, n_answer: int, session: str) -> Exchange:
    """One answer as a stream, of one token again and again, so that drafts find something."""
    phrase = tokens(12, zlib.crc32(session.encode()))
    body = {"prompt": phrase * 4, "n_predict": n_answer, "stream": True, "return_tokens": True, "session_id": session}
    return Wire(url).post("/completion", {**body, **GREEDY, "cache_prompt": False, "logit_bias": [[phrase[0], 100]]})


def turns(url: str, names: Sequence[str]) -> dict[str, float]:
    """What the proxy says of the turns that have just ended."""
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        while True:
            rows = {row["session_id"]: row for row in client.get("/polykv/sessions").json()["sessions"]}
            if all(name in rows and rows[name]["state"] == "idle" and rows[name]["tps_last_turn"] for name in names):
                return {name: rows[name]["tps_last_turn"] for name in names}
            time.sleep(0.05)


class Watcher:
    """Follows `/polykv/tps`, and notes when it was told what."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 80), 60)
        self._socket.sendall(b"GET /polykv/tps?interval_ms=100&running=1 HTTP/1.1\r\nHost: p\r\n\r\n")
        self._thread = threading.Thread(target=self._follow)
        self.seen: list[tuple[float, str, float]] = []

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _follow(self) -> None:
        with self._socket.makefile("rb") as lines, suppress(ConnectionError):
            for line in lines:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    sessions = json.loads(line.removeprefix(b"data: "))["sessions"]
                    self.seen += [(now, row["session_id"], row["tps_ewma"]) for row in sessions if row["state"] == "active"]


# -- cost -----------------------------------------------------------------------------------------------------------------


def cost(report: Report, options: Options, plan: Plan) -> None:
    """One stream at the engine's own socket, with a reader of its counters and without."""
    n_answer = min(plan.n_answer, 512)
    sides = ("without", "with")
    answer_s, busy_s = [], []
    with Engine(options.engine, plan.path, context(plan)) as engine:
        for _ in range(2):
            trial(engine, n_answer)
        for _ in range(plan.n_blocks):
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            busy: dict[str, list[float]] = {side: [] for side in sides}
            for side in palindrome(sides):
                with Reader(engine) if side == "with" else nullcontext():
                    took, used = trial(engine, n_answer)
                seconds[side].append(took)
                busy[side].append(used)
            answer_s.append(seconds)
            busy_s.append(busy)
    speed, work = estimate(ratios(answer_s, "without", "with")), estimate(ratios(busy_s, "without", "with"))
    best = [f"{best_ratio(blocks, 'without', 'with'):.3f}" for blocks in (answer_s, busy_s)]
    report.table(
        f"{plan.model}: decode speed with a reader of the counters, ratio to without ({plan.n_blocks} palindromes)",
        ["by time", "best", "by CPU time", "best"],
        [[speed.show(3), best[0], work.show(3), best[1]]],
    )
    for name, value in (("", speed.median), ("_low", speed.low), ("_high", speed.high), ("_cpu", work.median)):
        report.metric(f"counters_ratio{name}_{plan.model}", value)
    report.at_least(f"decode_with_counters_{plan.model}", RATIO_LIMIT, speed.median)


def trial(engine: Engine, n_answer: int) -> tuple[float, float]:
    """Seconds from the first token to the last, and processor seconds of the engine."""
    body = {"prompt": tokens(16, 7), "n_predict": n_answer, "stream": True, "cache_prompt": False}
    begin = cpu_s(engine.process.pid)
    done = Wire(engine.socket).post("/completion", {**body, **GREEDY})
    return done.arrivals[n_answer - 1] - done.ttft_s, cpu_s(engine.process.pid) - begin


class Reader:
    """Reads the engine's events, counters ten times a second."""

    def __init__(self, engine: Engine) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(engine.socket))
        self._socket.sendall(f"GET /_polykv/v1/events HTTP/1.1\r\nHost: e\r\nx-polykv-key: {KEY}\r\n\r\n".encode())
        self._greeted = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> None:
        self._thread.start()
        self._greeted.wait()

    def __exit__(self, *exc: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _follow(self) -> None:
        while self._socket.recv(1 << 16):
            self._greeted.set()


if __name__ == "__main__":
    run("tps", __doc__, measure)
