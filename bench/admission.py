"""A floor of tokens per second that holds: couriers with and without admission, simulated a hundred times and on a real engine.

Every rule gets the same packages: agents with gaps between their turns. `none` starts all at once; `fixed` runs as many at a time
as the law of the engine says keep the floor, which nobody knows beforehand; `naive` starts one more every five seconds while the
raw mean is at the floor; `advisory` asks `capacity`; `enforced` is held by the gate. Floor: 15 tokens/s. What is compared is time
under the floor and wall time, against `naive`; the gate is the real one, the engine a law of step times.

Then the same on a real engine, with a floor at a part of its speed alone and times about a third of the usual ones: a probe, the
simulator fitted to it, one run of the courier in examples/ by each rule, forecasts against outcomes, and what the simulator says.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, median

from bench.kit.report import Report
from bench.kit.rig import Options, run
from bench.kit.stats import estimate
from bench.live import compare as live
from bench.sim.courier import RULES, deliver
from bench.sim.engine import StepLaw
from bench.sim.fleet import Result, Shape, work_of

FLOOR = 15.0
UNDER_LIMIT = 0.2
WALL_LIMIT = 1.0
LAWS = {
    "gpu": StepLaw(0.0123, 0.0115, 2.5e-7, 1 / 3000),
    "cpu": StepLaw(0.001, 0.015, 1e-6, 0.008),
}
"""`gpu`: 41 tokens/s alone and 11.7 with six, much as in the run that the source documents report. `cpu`: SmolLM2-135M on one
thread, where two at once take almost twice as long, and a prompt token half as long as one of an answer.
"""
GAPS_S = {"gpu": (0.0, 4.0, 10.0), "cpu": (4.0,)}
FIGURES = {
    "wall": "wall_s",
    "under floor": "under_floor_s",
    "deep": "deep_under_floor_s",
    "delivery p50": "delivery_p50_s",
    "all done p50": "turnaround_p50_s",
    "sessions kept": "goodput_sessions",
    "turns kept": "goodput_turns",
    "tokens/s": "tokens_per_s",
    "held": "held",
    "refused": "refused",
}

Fleet = tuple[str, float, str, int]


def add(parser: argparse.ArgumentParser) -> None:
    """Options of this bench."""
    parser.add_argument("--part", choices=["both", "simulated", "real"], default="both")
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2", help="of the real engine")
    parser.add_argument("--packages", type=int, default=8, help="of each run on the real engine")
    parser.add_argument("--run-s", type=float, default=35.0, help="about how long each of its four runs is to take")
    parser.add_argument("--probe-s", type=float, default=2.5, help="seconds of each sample of the probe")
    parser.add_argument("--out", type=Path, help="folder for the courier's report and picture of each run")


def measure(report: Report, options: Options) -> None:
    """The parts that were asked for."""
    if options.more.part != "real":
        simulated(report, options)
    if options.more.part != "simulated":
        live.measure(report, options)


def simulated(report: Report, options: Options) -> None:
    """All rules on all engines; the figures of each, and the ratios that goals are set for."""
    shape = Shape(n_packages=6, n_turns=(3, 6)) if options.quick else Shape(n_turns=(8, 20))
    seeds = range(4 if options.quick else 100)
    began = time.perf_counter()
    with ProcessPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        for name, gaps in GAPS_S.items():
            for gap_s in gaps:
                fleets = [(name, gap_s, rule, seed) for rule in RULES for seed in seeds]
                results = list(pool.map(one, fleets, [shape] * len(fleets), chunksize=4))
                of_rule = {rule: results[i * len(seeds) : (i + 1) * len(seeds)] for i, rule in enumerate(RULES)}
                compare(report, name, gap_s, of_rule)
    report.metric("seeds", len(seeds))
    report.metric("ramps_per_s", len(seeds) * len(RULES) * sum(map(len, GAPS_S.values())) / (time.perf_counter() - began))


def one(fleet: Fleet, shape: Shape) -> Result:
    """One fleet by one rule; pure, so that processes may share the work."""
    name, gap_s, rule, seed = fleet
    turns = Shape(shape.n_packages, shape.n_turns, gap_mean_s=max(gap_s, 1e-3))
    return deliver(work_of(turns, seed), LAWS[name], rule, FLOOR)


def compare(report: Report, name: str, gap_s: float, of_rule: dict[str, Sequence[Result]]) -> None:
    """One table, and the goals of one engine with one kind of gaps."""
    figures = {rule: [result.figures(FLOOR) for result in results] for rule, results in of_rule.items()}
    means = {rule: {key: mean(row[key] for row in rows) for key in rows[0]} for rule, rows in figures.items()}
    rows = [[rule, *(shown(means[rule][key]) for key in FIGURES.values())] for rule in RULES]
    report.table(f"{name}, gaps of {gap_s:g} s: means over {len(of_rule['naive'])} fleets; seconds, parts", ["", *FIGURES], rows)
    for rule in ("fixed", "advisory", "enforced"):
        label = f"{rule}_{name}_gap{gap_s:g}"
        under = means[rule]["under_floor_s"] / max(1e-9, means["naive"]["under_floor_s"])
        walls = [row["wall_s"] / base["wall_s"] for row, base in zip(figures[rule], figures["naive"], strict=True)]
        wall = estimate(walls)
        report.say(f"  {rule}: {under:.3f} of naive time under the floor, {wall.show(3)} of naive wall time")
        report.metric(f"under_ratio_{label}", under)
        report.metric(f"wall_ratio_{label}", wall.median)
        if rule == "fixed":
            continue
        report.at_most(f"under_floor_{label}", UNDER_LIMIT, under)
        report.at_most(f"wall_{label}", WALL_LIMIT, wall.median)
        errors = [error for result in of_rule[rule] for error in result.errors]
        if errors:
            report.metric(f"forecast_error_{label}", median(errors))
    for rule in RULES:
        for key in ("wall_s", "under_floor_s", "deep_under_floor_s", "delivery_p50_s", "tokens_per_s"):
            report.metric(f"{key}_{rule}_{name}_gap{gap_s:g}", means[rule][key])


def shown(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


if __name__ == "__main__":
    run("admission", __doc__, measure, add)
