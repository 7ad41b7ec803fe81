"""`python -m tests.upstream [TEST…]`: the suite directly and through the proxy; ends with 1 when a test differs unexpectedly.

Law: a test that ends differently is run once more both ways, alone; only what differs then is a difference.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.models import cache_dir
from tests.upstream import stand_in
from tests.upstream.known import KNOWN
from tests.upstream.suite import ROOT, Outcome, Suite, proxy_in_place

Outcomes = dict[str, Outcome]
HOW = {"pools": "", "off": "--off"}
"""Ways through: as everybody starts it, with the pools' sequence ids in the engine; and as a plain relay."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One test, ended in two ways."""

    test: str
    direct: Outcome
    through: Outcome

    @property
    def why(self) -> str | None:
        """The reason, of one that is known."""
        return KNOWN.get(self.test.removeprefix("unit/").partition("[")[0])

    def __str__(self) -> str:
        ends = [f"{one.outcome} {one.at}".strip() for one in (self.direct, self.through)]
        return f"{self.test}\n    direct:  {ends[0]}\n    through: {ends[1]}\n    {self.why or 'NOT KNOWN'}"


class Comparison:
    """Direct once, through in each way."""

    def __init__(self, suite: Suite, engine: Path, folder: Path, port: int) -> None:
        self._suite = suite
        self._engine = engine
        self._proxy = proxy_in_place(folder)
        self._port = port

    def direct(self, select: Sequence[str], name: str = "direct") -> Outcomes:
        """The engine alone."""
        return self._suite.run(self._engine, name, select, {}, self._port)

    def through(self, way: str, select: Sequence[str], name: str = "through") -> Outcomes:
        """The proxy in its place."""
        env = {stand_in.ENGINE: str(self._engine), stand_in.OPTIONS: HOW[way]}
        return self._suite.run(self._proxy, f"{name}-{way}", select, env, self._port)

    def differences(self, way: str, direct: Outcomes, through: Outcomes) -> list[Difference]:
        """What ends differently, twice."""
        first = _differing(direct, through)
        if not first:
            return []
        again = self.direct(first, "direct-again"), self.through(way, first, "through-again")
        return [Difference(test, again[0][test], again[1][test]) for test in _differing(*again)]


def _differing(direct: Outcomes, through: Outcomes) -> list[str]:
    missing = Outcome("not run", "")
    return [test for test in sorted(direct | through) if _end(direct.get(test, missing)) != _end(through.get(test, missing))]


def _end(one: Outcome) -> tuple[str, ...]:
    """How and where, and why but for numbers: prompts of some tests are random."""
    file, _, rest = one.at.partition(":")
    line, _, why = rest.partition(":")
    return one.outcome, file, line, re.sub(r"\d[\d.]*", "#", why)


def main() -> int:
    """Run, compare, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("tests", nargs="*", help="of the suite, as unit/test_basic.py::test_no_ui; all without")
    parser.add_argument("--engine", type=Path, default=ROOT / "llamafile")
    parser.add_argument("--source", type=Path, default=ROOT / "vendor" / "llamafile" / "llama.cpp", help="the engine's source tree")
    parser.add_argument("--way", choices=[*HOW, "both"], default="both")
    parser.add_argument("--port", type=int, default=18480)
    parser.add_argument("--report", type=Path, default=cache_dir().parent / "reports" / "upstream.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="upstream-suite-") as made:
        folder = Path(os.environ.get("POLYKV_UPSTREAM_FOLDER") or made)
        comparison = Comparison(Suite(arguments.source, folder), arguments.engine.resolve(), folder, arguments.port)
        direct = comparison.direct(arguments.tests)
        print(f"direct: {_counts(direct)}", flush=True)
        unknown = 0
        report: dict[str, object] = {"direct": _rows(direct)}
        for way in HOW if arguments.way == "both" else [arguments.way]:
            through = comparison.through(way, arguments.tests)
            found = comparison.differences(way, direct, through)
            print(f"through, {way}: {_counts(through)}; {len(found)} of {len(direct)} differ", flush=True)
            for one in found:
                print(f"  {one}", flush=True)
            unknown += sum(one.why is None for one in found)
            report[way] = {"outcomes": _rows(through), "differences": [str(one) for one in found]}
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps(report, indent=1))
        print(f"report: {arguments.report}")
        return 1 if unknown else 0


def _counts(outcomes: Outcomes) -> str:
    return ", ".join(f"{n} {outcome}" for outcome, n in Counter(one.outcome for one in outcomes.values()).most_common())


def _rows(outcomes: Outcomes) -> dict[str, str]:
    return {test: f"{one.outcome} {one.at}".strip() for test, one in sorted(outcomes.items())}


if __name__ == "__main__":
    sys.exit(main())
