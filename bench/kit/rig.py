"""The two engines, the models, the options that every bench has, and prompts.

Law: starts engines through `tests.engine.driver` and nothing else; prompts are functions of their seed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.kit.report import Report
from tests.engine.driver import Engine

ROOT = Path(__file__).resolve().parents[2]
GREEDY = {"temperature": 0, "seed": 1, "ignore_eos": True}
"""What every timed request says."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says. `quick` shows that the bench works; its figures are few and mean little."""

    quick: bool
    engine: Path
    twin: Path
    more: argparse.Namespace
    """Those of one bench."""


def run(
    name: str,
    doc: str | None,
    measure: Callable[[Report, Options], None],
    add: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> None:
    """The whole of a bench: options (`add` those of its own), measuring, report."""
    parser = argparse.ArgumentParser(
        prog=f"scripts/bench {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds on tiny models only: shows that the bench works")
    parser.add_argument("--engine", type=Path, default=_built("llamafile"), help="the patched engine (default ./llamafile)")
    parser.add_argument(
        "--twin", type=Path, default=_built("llamafile-stock"), help="the unpatched one (default ./llamafile-stock)"
    )
    add(parser)
    given = parser.parse_args()
    options = Options(given.quick, given.engine.resolve(), given.twin.resolve(), given)
    for path, how in ((options.engine, ""), (options.twin, " --unpatched")):
        if not path.is_file():
            sys.exit(f"there is no engine at {path}; build it with scripts/build_engine.sh{how}")
    report = Report(name)
    load = os.getloadavg()[0]
    measure(report, options)
    busy = max(load, os.getloadavg()[0] - 1)
    report.metric("load_average", busy)
    if busy > 0.5 * (os.cpu_count() or 1):
        report.say(
            f"\nThe machine was busy with other work (load average {busy:.1f}): trust 'best' and processor time more than times."
        )
    report.finish()


def _built(name: str) -> Path:
    return Path(os.environ.get(f"POLYKV_TEST_{name.upper().replace('-', '_')}") or ROOT / name)


def tokens(n: int, seed: int) -> list[int]:
    """n random ordinary token ids of SmolLM2's vocabulary."""
    source = random.Random(seed)
    return [source.randrange(300, 40000) for _ in range(n)]


def stock(path: Path, model: Path, args: list[str | int]) -> Engine:
    """The unpatched twin."""
    return Engine(path, model, args, max_pools=0)


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process; nanosecond steps where the kernel tells them, else hundredths of a second."""
    parts = [part.read_text().split()[0] for part in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    if parts:
        return sum(map(int, parts)) / 1e9
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
