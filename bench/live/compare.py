"""Four rules on a real engine: what each came to, against the naive one, and against what the fitted simulator said.

Law: the simulator is fitted before the runs and sees of them only how many tokens each turn had.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import httpx

from bench.kit.report import Report
from bench.kit.rig import Options, cpu_s, tokens
from bench.live.probe import LONG, Prober
from bench.live.rules import RULES, Plan, as_measured, deliver
from bench.sim import courier as sim
from bench.sim.engine import StepLaw, fit
from bench.sim.fleet import Shape, work_of
from examples.courier.chart import draw
from examples.courier.journal import Journal
from polykv_proxy.core.admission.policy import policy_of
from tests.engine.driver import KEY, Engine
from tests.fakes.proxy_process import Served
from tests.models import smollm2, tiny_model

UNDER_LIMIT, WALL_LIMIT, ERROR_LIMIT = 0.2, 1.0, 0.1
N_SLOTS = 8
FLOOR_PART = 0.3
"""Of the speed alone: on one thread three share the engine above it, four do not."""
RHYTHM = sim.Rhythm(naive_s=1.5, poll_s=0.25)
SETTLE = {"settle_tokens": 24, "settle_max_ms": 2500}
"""A third or so of the usual times: a run of a minute has as many decisions as one of three."""
ANSWERS = (400, 300, 240, 200, 160, 120, 100, 80, 64, 48, 32, 24)
SHOWN = {
    "wall": ("wall_s", "wall_s"),
    "under floor": ("under_floor_s", "under_floor_s"),
    "deep": ("deep_under_floor_s", "deep_under_floor_s"),
    "delivery p50": ("delivery_p50_s", "delivery_p50_s"),
    "all done p50": ("turnaround_p50_s", "turnaround_p50_s"),
    "sessions kept": ("sessions_at_floor", "goodput_sessions"),
    "turns kept": ("turns_at_floor", "goodput_turns"),
    "tokens/s": ("tokens_per_s", "tokens_per_s"),
    "held": ("held", "held"),
    "refused": ("refused", "refused"),
}
"""Heading; name of the figure in the journal, and in the simulator."""
PREDICTED = ("wall_s", "under_floor_s", "delivery_p50_s")

Figures = dict[str, float | None]


def measure(report: Report, options: Options) -> None:
    """Probe, fit, four runs, and what the simulator makes of each."""
    more, quick = options.more, options.quick
    model = tiny_model("full") if quick or more.model == "tiny" else smollm2()
    with proxied(options, model) as (url, pid), httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        pool = tokens(LONG, 9)
        pool_id = http.post("/polykv/pools", json={"tokens": pool}).raise_for_status().json()["pool_id"]
        prober = Prober(url, pool, pool_id, 0.2 if quick else more.probe_s)
        law = fit(prober.samples())
        plan = planned(url, prober.solo_tps, law, n_packages=3 if quick else more.packages, run_s=1.0 if quick else more.run_s)
        say(report, prober.solo_tps, law, plan)
        journals: dict[str, Journal] = {}
        processor_s: dict[str, float] = {}
        for rule in RULES:
            before = cpu_s(pid)
            journals[rule] = deliver(plan, rule)
            processor_s[rule] = cpu_s(pid) - before
            wall_s = journals[rule].figures()["wall_s"] or 1.0
            busy, alone = processor_s[rule] / wall_s, prober.alone() / prober.solo_tps
            report.say(
                f"  {rule}: {wall_s:.0f} s, in {busy:.0%} of it the engine had a processor; one alone is now {alone:.2f} as fast"
            )
            report.metric(f"real_engine_busy_{rule}", busy)
            report.metric(f"real_solo_ratio_after_{rule}", alone)
    if more.out is not None:
        keep(more.out, journals)
    judge(report, plan, law, journals, processor_s)


@contextmanager
def proxied(options: Options, model: Path) -> Iterator[tuple[str, int]]:
    """A proxy before one engine on one thread: its address, and the engine's process."""
    args: list[str | int] = ["-c", 32768, "-np", N_SLOTS, "-t", 1, "-kvu", "--cache-ram", 0]
    with (
        tempfile.TemporaryDirectory(prefix="polykv-bench-") as folder,
        Engine(options.engine, model, args) as engine,
        Served.before(engine.socket, KEY, Path(folder)) as served,
    ):
        yield served.url, engine.process.pid
        served.stop()


def planned(url: str, solo_tps: float, law: StepLaw, *, n_packages: int, run_s: float) -> Plan:
    """The longest answers with which all packages at once take no more than `run_s`, by the fitted law."""
    floor = FLOOR_PART * solo_tps
    shape = Shape(n_packages, (3, 5), (40, 80), (15, 40), gap_mean_s=min(1.0, run_s / 40))
    works = [replace(work_of(replace(shape, answer_mean=float(mean)), 1), n_prefix=LONG) for mean in ANSWERS]
    fits = (work for work in works if sim.deliver(work, law, "none", floor).wall_s <= run_s)
    line = {"on_saturation": "queue", "max_queue": 1024, "queue_timeout_ms": 3_600_000}
    return Plan(url, floor, next(fits, works[-1]), RHYTHM, {**SETTLE, **line})


def say(report: Report, solo_tps: float, law: StepLaw, plan: Plan) -> None:
    n = sim.at_the_floor(law, plan.floor, plan.work.n_prefix)
    report.say(
        f"\nreal engine: {solo_tps:.1f} tokens/s alone; a step is {law.a * 1e3:.2f} ms + {law.b * 1e3:.2f} for each that decodes"
        f" + {law.c * 1e6:.2f} per 1000 tokens of context + {law.p * 1e3:.2f} for each prompt token"
        f"\nfloor {plan.floor:.1f} tokens/s, which {n} keep by that law; {len(plan.work.packages)} packages,"
        f" {sum(map(len, plan.work.packages))} turns, {plan.work.n_tokens} tokens of answers"
    )
    for name, value in (("solo_tps", solo_tps), ("floor_tps", plan.floor), ("sessions_at_floor_by_law", n)):
        report.metric(f"real_{name}", value)


def judge(report: Report, plan: Plan, law: StepLaw, journals: dict[str, Journal], processor_s: dict[str, float]) -> None:
    """Two tables, the goals, and the errors of forecasts and of the simulator."""
    real = {rule: journal.figures() for rule, journal in journals.items()}
    rows = [[rule, *(shown(real[rule][ours]) for ours, _ in SHOWN.values())] for rule in RULES]
    report.table("real engine: seconds, parts", ["", *SHOWN], rows)
    predicted = {rule: predict(plan, law, rule, journal) for rule, journal in journals.items()}
    rows = [[rule, *(shown(predicted[rule][theirs]) for _, theirs in SHOWN.values())] for rule in RULES]
    report.table("the same by the fitted simulator", ["", *SHOWN], rows)
    for rule in RULES:
        for ours, theirs in SHOWN.values():
            if (value := real[rule][ours]) is not None:
                report.metric(f"real_{ours}_{rule}", value)
            if ours in PREDICTED:
                report.metric(f"predicted_{ours}_{rule}", predicted[rule][theirs])
    goals(report, real, predicted)
    forecasts(report, journals)
    wall_error = median(abs(predicted[rule]["wall_s"] / (real[rule]["wall_s"] or 1) - 1) for rule in RULES)
    busy_error = median(abs(predicted[rule]["busy_s"] / processor_s[rule] - 1) for rule in RULES)
    report.metric("real_sim_wall_error", wall_error)
    report.metric("real_sim_processor_error", busy_error)
    report.say(
        f"  the simulator is off by {wall_error:.1%} of the wall time, and by {busy_error:.1%} of the engine's processor time"
    )


def goals(report: Report, real: dict[str, Figures], predicted: dict[str, dict[str, float]]) -> None:
    for rule in ("none", "advisory", "enforced"):
        under = ratio(real[rule]["under_floor_s"], real["naive"]["under_floor_s"])
        wall = ratio(real[rule]["wall_s"], real["naive"]["wall_s"])
        by_sim = ratio(predicted[rule]["under_floor_s"], predicted["naive"]["under_floor_s"])
        wall_by_sim = ratio(predicted[rule]["wall_s"], predicted["naive"]["wall_s"])
        report.say(
            f"  {rule}: {under:.2f} of naive time under the floor (by the simulator {by_sim:.2f}),"
            f" {wall:.2f} of naive wall time (by the simulator {wall_by_sim:.2f})"
        )
        if rule == "none":
            continue
        report.at_most(f"real_under_floor_{rule}", UNDER_LIMIT, under)
        report.at_most(f"real_wall_{rule}", WALL_LIMIT, wall)
        report.metric(f"predicted_under_ratio_{rule}", by_sim)
        report.metric(f"predicted_wall_ratio_{rule}", wall_by_sim)


def forecasts(report: Report, journals: dict[str, Journal]) -> None:
    pairs = {rule: journals[rule].forecasts() for rule in ("advisory", "enforced")}
    errors = [abs(projected / realised - 1) for found in pairs.values() for projected, realised in found]
    for rule, found in pairs.items():
        told = ", ".join(f"{projected:.1f} -> {realised:.1f}" for projected, realised in found)
        report.say(f"  {rule}: projected -> realised mean after settling: {told or 'none was projected'}")
    report.metric("real_forecasts", len(errors))
    if errors:
        report.at_most("real_forecast_error", ERROR_LIMIT, median(errors))


def predict(plan: Plan, law: StepLaw, rule: str, journal: Journal) -> dict[str, float]:
    """What the simulator says of this run."""
    policy = policy_of(
        {"target_tps_per_session": plan.floor, "mode": "enforced" if rule == "enforced" else "advisory"} | plan.policy
    )
    work = as_measured(journal, plan.work)
    courier = sim.Courier(work, law, rule, plan.floor, policy, rhythm=plan.rhythm, n_slots=N_SLOTS)
    return {**courier.run().figures(plan.floor), "busy_s": courier.engine.busy_s}


def ratio(value: float | None, base: float | None) -> float:
    """Of seconds; what is nothing counts as a tenth of a second, so that the ratio is a number."""
    return (value or 0.0) / max(0.1, base or 0.0)


def keep(folder: Path, journals: dict[str, Journal]) -> None:
    """The courier's report of each run."""
    folder.mkdir(parents=True, exist_ok=True)
    for rule, journal in journals.items():
        (folder / f"{rule}.json").write_text(json.dumps(journal.as_object(), indent=1))
        draw(journal, folder / f"{rule}.svg")


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"
