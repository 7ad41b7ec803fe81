"""What the patches cost those who do not use them: bytes and speed against the unpatched engine.

Bytes: the same conversation over every generating route; pools off on every memory class, pools on but unused on plain attention
with the same layout. Speed: prompt and answer tokens per second of three engines that take turns (unpatched, off, on but unused),
in palindromes, as ratios inside each palindrome; the clock stands outside the engine. The engine's CPU time is taken too: it tells
work from waiting for a processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.kit.report import Report
from bench.kit.rig import GREEDY, Options, cpu_s, run, tokens
from bench.kit.stats import Estimate, best_ratio, estimate, palindrome, pooled, ratios
from bench.kit.wire import Wire
from tests.engine.driver import Engine
from tests.engine.test_off_path import transcript
from tests.models import gemma3, smollm2, tiny_model

RATIO_LIMIT = 0.99
SPEED_ARGS: list[str | int] = ["-c", 4096, "-np", 4, "-t", 1, "-kvu", "--cache-ram", 0]
BYTE_ARGS: list[str | int] = ["-c", 1024, "-np", 2, "-t", 1]
NO_KEY = {"LLAMA_ARG_POLYKV_KEY": ""}
SIDES = ("twin", "off", "unused")


@dataclass(frozen=True, slots=True)
class Plan:
    """One model's speed trials: so many prompt and answer tokens, so many palindromes."""

    model: str
    path: Path
    n_prompt: int
    n_answer: int
    n_blocks: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One request: seconds to the first token, seconds from the first to the last, CPU seconds of the engine, and its answer."""

    prompt_s: float
    answer_s: float
    cpu_s: float
    answer: list[int]


def measure(report: Report, options: Options) -> None:
    """Bytes first, then speed."""
    bytes_part(report, options)
    for plan in plans(options.quick):
        speed_part(report, options, plan)


def plans(quick: bool) -> list[Plan]:
    """The real model decides; the tiny one, whose steps take half a millisecond, shows what a step costs besides computing."""
    if quick:
        return [Plan("tiny", tiny_model("full"), 64, 64, 4)]
    return [Plan("smollm2", smollm2(), 48, 32, 14), Plan("tiny", tiny_model("full"), 512, 256, 40)]


def bytes_part(report: Report, options: Options) -> None:
    """Whole transcripts, times and random ids taken out, must be equal."""
    kinds = {
        name: tiny_model(name)
        for name in (["full", "swa"] if options.quick else ["full", "swa", "recurrent", "hybrid", "hybrid-swa"])
    }
    if not options.quick:
        kinds |= {"gemma3": gemma3()}
    rows, all_off = [], True
    for kind, path in kinds.items():
        off = same_bytes(options, path, [*BYTE_ARGS], max_pools=0)
        all_off = all_off and off
        unused = same_bytes(options, path, [*BYTE_ARGS, "-kvu"], max_pools=8) if kind == "full" else None
        rows.append([kind, word(off), word(unused)])
        if unused is not None:
            report.holds("identical_unused_plain_attention", "every byte", unused)
    report.holds("identical_off", "every byte on every model class", all_off)
    report.metric("model_classes", len(kinds))
    report.table(
        "bytes of a conversation over all generating routes, against the unpatched engine",
        ["model", "pools off", "on, unused"],
        rows,
    )


def same_bytes(options: Options, model: Path, args: list[str | int], max_pools: int) -> bool:
    with Engine(options.twin, model, args, max_pools=0, env=NO_KEY) as twin:
        want = transcript(twin, {})
    with Engine(options.engine, model, args, max_pools=max_pools, env=NO_KEY if max_pools == 0 else {}) as engine:
        return transcript(engine, {}) == want


def word(same: bool | None) -> str:
    return "-" if same is None else "identical" if same else "DIFFERENT"


def speed_part(report: Report, options: Options, plan: Plan) -> None:
    """All palindromes of a model, the table, the goals."""
    prompt_s, answer_s, busy_s = [], [], []
    answers: set[tuple[int, ...]] = set()
    with engines(options, plan.path) as sides:
        for side in sides:
            trial(plan, sides[side])
        for number in range(plan.n_blocks):
            block: dict[str, list[Trial]] = {side: [] for side in SIDES}
            for side in palindrome([SIDES[0], *rotated(SIDES[1:], number)]):
                block[side].append(trial(plan, sides[side]))
            prompt_s.append({side: [t.prompt_s for t in block[side]] for side in SIDES})
            answer_s.append({side: [t.answer_s for t in block[side]] for side in SIDES})
            busy_s.append({side: [t.cpu_s for t in block[side]] for side in SIDES})
            answers |= {tuple(t.answer) for trials in block.values() for t in trials}
    report.holds(f"same_answer_{plan.model}", "one answer of all engines", len(answers) == 1)
    rows = []
    for side in SIDES:
        rate_in = plan.n_prompt / estimate(pooled(prompt_s, side)).median
        rate_out = (plan.n_answer - 1) / estimate(pooled(answer_s, side)).median
        report.metric(f"{side}_prompt_tps_{plan.model}", rate_in)
        report.metric(f"{side}_decode_tps_{plan.model}", rate_out)
        rows.append(
            [NAMES[side], f"{rate_in:.1f}", *shown(prompt_s, side), f"{rate_out:.1f}", *shown(answer_s, side), *shown(busy_s, side)]
        )
        if side != "twin":
            goals(report, plan, side, prompt_s, answer_s, busy_s)
    head = ["engine", "prompt tokens/s", "ratio", "best", "answer tokens/s", "ratio", "best", "by CPU time", "best"]
    what = f"{plan.model}: {plan.n_prompt} prompt and {plan.n_answer} answer tokens, {plan.n_blocks} palindromes"
    title = f"{what} (ratio to unpatched: median [95 % interval])"
    report.table(title, head, rows)


NAMES = {"twin": "unpatched", "off": "patched, pools off", "unused": "patched, pools on, unused"}
Blocks = Sequence[dict[str, list[float]]]


def rotated(sides: Sequence[str], by: int) -> list[str]:
    """The sides, beginning with another one each time: no side always follows the same neighbour."""
    by %= len(sides)
    return [*sides[by:], *sides[:by]]


def speed_ratio(blocks: Blocks, side: str) -> Estimate:
    """Rate of a side over the twin's: seconds of the twin over seconds of the side."""
    return estimate(ratios(blocks, "twin", side))


def shown(blocks: Blocks, side: str) -> list[str]:
    """Ratio with its interval, and that of the best trials."""
    return ["1", "1"] if side == "twin" else [speed_ratio(blocks, side).show(3), f"{best_ratio(blocks, 'twin', side):.3f}"]


def goals(report: Report, plan: Plan, side: str, prompt_s: Blocks, answer_s: Blocks, busy_s: Blocks) -> None:
    for what, blocks in (("prompt", prompt_s), ("decode", answer_s), ("cpu", busy_s)):
        ratio = speed_ratio(blocks, side)
        report.metric(f"{side}_{what}_best_ratio_{plan.model}", best_ratio(blocks, "twin", side))
        for part, value in (("", ratio.median), ("_low", ratio.low), ("_high", ratio.high)):
            report.metric(f"{side}_{what}_ratio{part}_{plan.model}", value)
    report.at_least(f"{side}_decode_ratio_{plan.model}", RATIO_LIMIT, speed_ratio(answer_s, side).median)


@contextmanager
def engines(options: Options, model: Path) -> Iterator[dict[str, Engine]]:
    """The three of them; only the one that is asked works."""
    with ExitStack() as stack:
        twin = Engine(options.twin, model, SPEED_ARGS, max_pools=0, env=NO_KEY)
        off = Engine(options.engine, model, SPEED_ARGS, max_pools=0, env=NO_KEY)
        unused = Engine(options.engine, model, SPEED_ARGS, max_pools=16)
        yield {side: stack.enter_context(engine) for side, engine in zip(SIDES, (twin, off, unused), strict=True)}


def trial(plan: Plan, engine: Engine) -> Trial:
    """The same prompt computed anew, and the same answer."""
    body = {
        "prompt": tokens(plan.n_prompt, 7),
        "n_predict": plan.n_answer,
        "stream": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    begin = cpu_s(engine.process.pid)
    done = Wire(engine.socket).post("/completion", {**body, **GREEDY})
    used = cpu_s(engine.process.pid) - begin
    answer = [token for event in done.events for token in event.get("tokens", [])]
    return Trial(done.ttft_s, done.arrivals[plan.n_answer - 1] - done.ttft_s, used, answer)


if __name__ == "__main__":
    run("offpath", __doc__, measure)
