"""Engines that share one device by weight: proportions, what the turns cost, stalls, and what happens when one leaves.

The device is one processor core to which all are bound. `spin` engines do nothing but steps of 2 ms, calibrated; `one-layer` and
`smollm2` are the engine itself (`-t 1`). Beside each run the same without turns. Solo, paced and free runs alternate in
palindromes, so that a drift cancels. The engines have the highest priority, where that is allowed: other work hardly counts.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from bench.kit.report import Report
from bench.kit.rig import GREEDY, Options, cpu_s, run, tokens
from bench.kit.stats import estimate, palindrome, pooled, ratios
from bench.kit.wire import Wire
from polykv_proxy.gpu_share import layout
from polykv_proxy.gpu_share.schedule import make_schedule, shares
from tests import native
from tests.engine.driver import Engine
from tests.integration.gpu_share.peers import new_key
from tests.models import smollm2, tiny_model

STEP_MS = 2.0
RATIO_WITHIN = 0.05
REAL_WITHIN = 0.20
AGGREGATE = 0.97
WAKE_MS = 1.0
"""What it may take to be woken up, beside the bound of a stall."""
IDLE_S, DEAD_S = 2.0, 3.0
WEIGHTS: Sequence[tuple[float, ...]] = ((1, 1), (2, 1), (3, 1), (9, 1), (2, 1, 1))
SIDES = ("solo", "paced", "free")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one engine did in one run: steps (or tokens) a second, and the gaps between them."""

    rate: float
    gaps_ms: tuple[float, ...]

    def gap(self, part: float) -> float:
        ordered = sorted(self.gaps_ms)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def measure(report: Report, options: Options) -> None:
    """Spin engines first: what is claimed is claimed there."""
    core = max(os.sched_getaffinity(0))
    seconds, n_blocks = (0.6, 1) if options.quick else (1.5, 2)
    for weights in WEIGHTS[1:2] if options.quick else WEIGHTS:
        with spins(weights, core) as paced, spins(weights, core, shared=False) as free:
            proportions(report, "spin", weights, {"solo": free[:1], "paced": paced, "free": free}, STEP_MS, seconds, n_blocks)
    if not options.quick:
        for step_ms in (10.0, 30.0):
            with spins((2, 1), core, step_ms=step_ms) as paced, spins((2, 1), core, step_ms=step_ms, shared=False) as free:
                label = f"spin_{step_ms:g}ms"
                proportions(report, label, (2, 1), {"solo": free[:1], "paced": paced, "free": free}, step_ms, seconds, n_blocks)
        leaving(report, core)
    engines(report, options, core, seconds, n_blocks)
    alone(report, options, core)


# -- spin engines ---------------------------------------------------------------------------------------------------------


class Spin:
    """One process of `tests/cpp/gpu_share_spin.cpp`."""

    def __init__(self, program: Path, key: str, weight: float, step_ms: float, core: int) -> None:
        words = ["nice", "-n", "-20", program, key, str(weight), str(int(step_ms * 1000)), str(core)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        if self.heard() != "ready":
            raise RuntimeError("a spin engine did not start")

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, *lines: str) -> None:
        assert self.process.stdin is not None
        for line in lines:
            print(line, file=self.process.stdin, flush=True)

    def end(self) -> Seen:
        self.say("end")
        found = json.loads(self.heard())
        return Seen(found["steps"] / found["seconds"], tuple(found["gaps_ms"]) or (0.0,))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def spins(weights: Sequence[float], core: int, *, step_ms: float = STEP_MS, shared: bool = True) -> Iterator[list[Spin]]:
    sources = [*sorted(native.OURS.glob("gpu-share-[!p]*.cpp")), native.CPP / "gpu_share_spin.cpp"]
    program = native.program("gpu_share_spin", sources)
    with ExitStack() as stack:
        key = stack.enter_context(new_key()) if shared else "-"
        made = []
        for weight in weights:
            made.append(Spin(program, key, weight, step_ms, core))
            stack.callback(made[-1].close)
        yield made


def trial(peers: Sequence[Spin], seconds: float) -> list[Seen]:
    """All run; the first moments, until they have found each other, do not count."""
    for peer in peers:
        peer.say("go")
    time.sleep(0.5)
    for peer in peers:
        peer.say("begin")
    time.sleep(seconds)
    seen = [peer.end() for peer in peers]
    for peer in peers:
        peer.say("idle")
    return seen


def proportions(
    report: Report,
    label: str,
    weights: Sequence[float],
    sides: dict[str, list[Spin]],
    step_ms: float,
    seconds: float,
    n_blocks: int,
) -> None:
    """Ratio, aggregate and stalls of one set of weights, beside the same without turns, over whole periods."""
    seconds = whole_periods(weights, seconds)
    runs: dict[str, list[list[Seen]]] = {side: [] for side in SIDES}
    blocks = []
    for _ in range(n_blocks):
        rates: dict[str, list[float]] = {side: [] for side in SIDES}
        for side in palindrome(SIDES):
            runs[side].append(trial(sides[side], seconds))
            rates[side].append(sum(seen.rate for seen in runs[side][-1]))
        blocks.append(rates)
    judge(report, label, weights, runs, blocks, step_ms=step_ms, within=RATIO_WITHIN, claimed=step_ms <= STEP_MS)


def judge(
    report: Report,
    label: str,
    weights: Sequence[float],
    runs: dict[str, list[list[Seen]]],
    blocks: Sequence[dict[str, list[float]]],
    *,
    step_ms: float,
    within: float,
    claimed: bool,
) -> None:
    name = f"{label}_{'_'.join(f'{weight:g}' for weight in weights)}"
    parts, period_ms = [float(share) for share in shares(weights)], schedule_ms(weights)
    whole = [median(seen[n].rate for seen in runs["paced"]) for n in range(len(weights))]
    error = max(abs(whole[n] / whole[-1] / (parts[n] / parts[-1]) - 1) for n in range(len(weights) - 1))
    aggregate = estimate(ratios(blocks, "paced", "solo"))
    best = max(pooled(blocks, "paced")) / max(pooled(blocks, "solo"))
    report.at_most(f"ratio_error_{name}", within, error)
    report.metric(f"aggregate_{name}", aggregate.median)
    report.metric(f"aggregate_best_{name}", best)
    if claimed:
        report.at_least(f"aggregate_of_solo_{name}", AGGREGATE, aggregate.median)
    rows = []
    for side in ("paced", "free"):
        for n, weight in enumerate(weights):
            seen = Seen(median(run[n].rate for run in runs[side]), tuple(gap for run in runs[side] for gap in run[n].gaps_ms))
            bound = (1 - parts[n]) * period_ms + step_ms
            stalls = sorted(gap for gap in seen.gaps_ms if gap > bound / 2) or [0.0]
            stall = stalls[int(0.95 * (len(stalls) - 1))]
            if side == "paced" and claimed:
                report.at_most(f"stall_ms_{name}_peer{n}", bound + WAKE_MS, stall)
            shown = [f"{seen.rate:.1f}", f"{seen.rate / median(run[-1].rate for run in runs[side]):.2f}"]
            gaps = [f"{seen.gap(part):.1f}" for part in (0.5, 0.95, 1.0)]
            rows.append([f"{side}, weight {weight:g}", *shown, *gaps, f"{stall:.1f}", f"{bound:.1f}" if side == "paced" else "-"])
    title = (
        f"{label}, weights {':'.join(f'{weight:g}' for weight in weights)}: aggregate of solo {aggregate.show(3)}, best {best:.3f}"
    )
    report.table(title, ["", "steps/s", "ratio", "gap p50 ms", "p95", "max", "stalls p95", "bound"], rows)


def whole_periods(weights: Sequence[float], seconds: float) -> float:
    """So many seconds or a little more: in parts of a period the proportions are others."""
    period_s = schedule_ms(weights) / 1000
    return math.ceil(seconds / period_s) * period_s


def schedule_ms(weights: Sequence[float]) -> float:
    entries = [layout.Entry(slot, 1, 1, 0, weight, True, 0, 0, "") for slot, weight in enumerate(weights)]
    return make_schedule(entries).period_us / 1000


# -- leaving --------------------------------------------------------------------------------------------------------------


def leaving(report: Report, core: int) -> None:
    """How long until the other has the device: one goes idle, is killed, is stopped and comes back; and a late start."""
    rows = []
    for what, limit in (("idle", IDLE_S), ("kill", DEAD_S), ("stop", DEAD_S)):
        with spins((1, 1), core) as (stays, leaves):
            trial([stays, leaves], 1.0)
            for peer in (stays, leaves):
                peer.say("go")
            time.sleep(1.0)
            stays.say("begin")
            begin = time.perf_counter()
            if what == "idle":
                leaves.say("idle")
            else:
                leaves.process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            time.sleep(10.0 if what == "stop" else 5.0)
            left = time.perf_counter() - begin
            gaps = stays.end().gaps_ms
            free_s = last_stall_s(gaps)
            rows.append([what, f"{free_s:.2f}", f"{limit:g}", f"{left:.1f}"])
            # a beat may be half a second old when its owner dies, and what was waiting waits until its next window
            report.at_most(f"solo_again_s_{what}", limit + 0.1, free_s)
            if what == "stop":
                leaves.process.send_signal(signal.SIGCONT)
                time.sleep(0.5)
                seen = trial([stays, leaves], 4.0)
                report.at_most("ratio_error_after_stop", RATIO_WITHIN, abs(seen[0].rate / seen[1].rate - 1))
    with spins((2, 1), core) as (first, late):
        first.say("go")
        time.sleep(20.0)
        seen = trial([first, late], 4.0)
        error = abs(seen[0].rate / seen[1].rate / 2 - 1)
        rows.append(["20 s start skew, 2:1", f"{seen[0].rate / seen[1].rate:.2f}", "2", "-"])
        report.at_most("ratio_error_start_skew", RATIO_WITHIN, error)
    report.table("until the other has the device to itself", ["", "s", "limit", "watched s"], rows)


def last_stall_s(gaps_ms: Sequence[float]) -> float:
    """When the last stall ended that followed another within two periods: turns stall in every one, other work now and then."""
    at, before, last = 0.0, -1000.0, 0.0
    for gap in gaps_ms:
        at += gap
        if gap > 30:
            last = at if at - before < 160 else last
            before = at
    return last / 1000


# -- the engine itself ----------------------------------------------------------------------------------------------------


@contextmanager
def bound(options: Options, model: Path, core: int, key: str, weight: float, n_slots: int) -> Iterator[Engine]:
    """An engine on one core; `key` empty: it shares nothing."""
    env = {"LLAMA_ARG_GPU_SHARE_KEY": key, "LLAMA_ARG_GPU_SHARE_WEIGHT": f"{weight:g}"} if key else {}
    with Engine(options.engine, model, ["-c", 8192, "-np", n_slots, "-t", 1], max_pools=0, env=env) as engine:
        for thread in psutil.Process(engine.process.pid).threads():
            os.sched_setaffinity(thread.id, {core})
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, thread.id, -20)
        yield engine


def answers(engines: Sequence[Engine], n_tokens: Sequence[int], n_streams: int) -> list[list[list[float]]]:
    """Arrivals of all tokens of all streams, by engine; all streams at once."""

    def one(engine: Engine, n: int, seed: int) -> list[float]:
        body = {"prompt": tokens(8, seed), "n_predict": n, "stream": True, "cache_prompt": False}
        done = Wire(engine.socket).post("/completion", {**body, **GREEDY})
        return [done.began + at for at in done.arrivals]

    with ThreadPoolExecutor(len(engines) * n_streams) as pool:
        jobs = [
            [pool.submit(one, engine, n, seed) for seed in range(n_streams)] for engine, n in zip(engines, n_tokens, strict=True)
        ]
        return [[job.result() for job in row] for row in jobs]


def both(engines: Sequence[Engine], n_tokens: Sequence[int], n_streams: int, period_s: float) -> list[Seen]:
    """Rates over the whole periods in which all of them generated."""
    arrivals = answers(engines, n_tokens, n_streams)
    begin = max(stream[0] for row in arrivals for stream in row) + 0.1
    end = min(stream[-1] for row in arrivals for stream in row)
    end = begin + ((end - begin) // period_s * period_s or end - begin)
    found = []
    for row in arrivals:
        inside = [[at for at in stream if begin <= at <= end] for stream in row]
        gaps = tuple((b - a) * 1000 for stream in inside for a, b in pairwise(stream))
        found.append(Seen(sum(map(len, inside)) / max(1e-9, end - begin), gaps or (0.0,)))
    return found


def engines(report: Report, options: Options, core: int, seconds: float, n_blocks: int) -> None:
    """The engine with a model of one layer, with four requests at once, and with a real model."""
    plans = [("one_layer", tiny_model("one-layer"), 1, weights) for weights in WEIGHTS[:3]]
    plans += [("one_layer_x4", tiny_model("one-layer"), 4, (2, 1)), ("smollm2", smollm2(), 1, (2, 1))]
    for label, model, n_streams, weights in plans[1:2] if options.quick else plans:
        with ExitStack() as stack:
            key = stack.enter_context(new_key())
            paced = [stack.enter_context(bound(options, model, core, key, weight, n_streams)) for weight in weights]
            free = [stack.enter_context(bound(options, model, core, "", weight, n_streams)) for weight in weights]
            stream = answers(free[:1], [32], n_streams)[0][0]
            speed = (len(stream) - 1) / max(0.001, stream[-1] - stream[0])  # beside other work all can come in one read
            n = max(16, min(7000 // n_streams, int(speed * seconds)))
            step_ms = 1000 / speed
            runs: dict[str, list[list[Seen]]] = {side: [] for side in SIDES}
            blocks = []
            for _ in range(max(1, n_blocks // 2)):
                rates: dict[str, list[float]] = {side: [] for side in SIDES}
                for side in palindrome(SIDES):
                    parts = [float(share) for share in shares(weights)] if side == "paced" else [1 / len(weights)] * len(weights)
                    chosen = free[:1] if side == "solo" else paced if side == "paced" else free
                    wanted = [n] if side == "solo" else [max(16, int(n * part)) for part in parts]
                    runs[side].append(both(chosen, wanted, n_streams, schedule_ms(weights) / 1000))
                    rates[side].append(sum(seen.rate for seen in runs[side][-1]))
                blocks.append(rates)
            real = label == "smollm2"
            within = REAL_WITHIN if real else RATIO_WITHIN
            judge(
                report, label, weights, runs, blocks, step_ms=step_ms, within=within, claimed=step_ms <= STEP_MS and n_streams == 1
            )


def alone(report: Report, options: Options, core: int) -> None:
    """What being on the list costs an engine that is alone: one look at the registry a step."""
    model, sides = tiny_model("one-layer"), ("off", "alone")
    n, n_blocks = (200, 2) if options.quick else (1500, 6)
    with ExitStack() as stack:
        key = stack.enter_context(new_key())
        found = {side: stack.enter_context(bound(options, model, core, key if side == "alone" else "", 1, 1)) for side in sides}
        blocks, busy = [], []
        for _ in range(n_blocks):
            rates: dict[str, list[float]] = {side: [] for side in sides}
            used: dict[str, list[float]] = {side: [] for side in sides}
            for side in palindrome(sides):
                begin = cpu_s(found[side].process.pid)
                (stream,) = answers([found[side]], [n], 1)[0]
                used[side].append(cpu_s(found[side].process.pid) - begin)
                rates[side].append((n - 1) / max(0.001, stream[-1] - stream[0]))
            blocks.append(rates)
            busy.append(used)
    ratio, work = estimate(ratios(blocks, "alone", "off")), estimate(ratios(busy, "off", "alone"))
    best = max(pooled(blocks, "alone")) / max(pooled(blocks, "off"))
    title = "alone on the list, decode speed of the one-layer model, ratio to off"
    report.table(title, ["by time", "best", "by CPU time"], [[ratio.show(3), f"{best:.3f}", work.show(3)]])
    report.metric("alone_ratio", ratio.median)
    report.at_least("alone_of_off_cpu", 0.99, work.median)


if __name__ == "__main__":
    run("gpu_share", __doc__, measure)
