"""Mixed traffic of hundreds of clients, and two dozen that watch: each request ends by an answer of its kind, nothing grows, and
everything comes back.

Law: a third of the time belongs to the owners (soak_owners.py) alone, so that all they do is seen; then the crowd (soak_crowd.py)
comes too. Run by `scripts/soak`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.e2e import soak_engines
from tests.e2e.soak_crowd import MOST_UNFAIR, SYSTEM, Figures, crowd
from tests.e2e.soak_engines import BODY_LIMIT, N_SLOTS
from tests.e2e.soak_gauges import GOAL_S, Gauge, Pulse, pulse, quantile
from tests.e2e.soak_owners import Owner
from tests.e2e.soak_watchers import BrokenError, Follower, Scraper, Sleeper, Visitor, Watcher
from tests.fakes.product import Product

N_OWNERS = 4
N_CROWD = 500
N_CROWD_POOLS = 4
N_FOLLOWERS = 10
N_SLEEPERS = 2
STREAMS = ("/polykv/tps?interval_ms=100", "/polykv/events")
"""So many of each kind on each stream."""
N_SAMPLES = 24


@dataclass
class Outcome:
    """Requests by what they were and how they ended, what each kind of watcher has seen, and what was measured."""

    counts: Counter[tuple[str, int]]
    seen: Counter[str]
    crowd: Figures
    pulse: Pulse


class Soak:
    """One soak of a running proxy, whose engine has the process number `engine_pid`."""

    def __init__(self, proxy: Product, engine_pid: int, seconds: float, n_crowd: int) -> None:
        self.proxy, self.seconds, self.n_crowd = proxy, seconds, n_crowd
        self.over = threading.Event()
        self.broken: list[BaseException] = []
        self.owners = [Owner(proxy, number) for number in range(N_OWNERS)]
        self.gauges = [Gauge("proxy", psutil.Process(proxy.served.process.pid)), Gauge("engine", psutil.Process(engine_pid))]
        self.watchers: list[Watcher] = [
            *(Follower(proxy, path, self.over) for path in STREAMS for _ in range(N_FOLLOWERS)),
            *(Sleeper(proxy, path, self.over) for path in STREAMS for _ in range(N_SLEEPERS)),
            Visitor(proxy, self.over),
            Scraper(proxy, self.over),
        ]

    def run(self) -> Outcome:
        """To the end; BrokenError, or what a client or a watcher raised, at the first thing that is not right."""
        try:
            return self._run()
        except BaseException:
            self.over.set()
            self.proxy.served.process.kill()  # so that whoever still asks it comes to an end
            raise

    def _run(self) -> Outcome:
        watching = [self._guarded(watcher.watch) for watcher in self.watchers]
        owning = [self._guarded(lambda owner=owner: self._own(owner)) for owner in self.owners]  # type: ignore[misc]
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as others:
            asking = others.submit(pulse, self.proxy.served.url, self.proxy.served.process.pid, self.seconds)
            for thread in (*watching, *owning):
                thread.start()
            figures = self._sampled(others)
            beat = asking.result()
        self.over.set()
        for thread in owning:
            thread.join()
        self._raise()
        for gauge in self.gauges:
            gauge.check()
        give_back(self.proxy)
        for thread in watching:  # each was told of what was given back
            thread.join()
        self._raise()
        counts = sum((owner.statuses for owner in self.owners), Counter(figures.counts))
        return Outcome(counts, seen_by(self.watchers), figures, beat)

    def _sampled(self, others: ProcessPoolExecutor) -> Figures:
        """Sample until the time is over, and let the crowd in after a third of it."""
        started, coming = time.monotonic(), None
        for n in range(N_SAMPLES):
            if n == N_SAMPLES // 3:
                coming = self._let_in(others, self.seconds - (time.monotonic() - started))
            if self.over.wait(self.seconds / N_SAMPLES):
                self._raise()
            done = sum(sum(owner.statuses.values()) for owner in self.owners)
            told = "  ".join(gauge.sample() for gauge in self.gauges)
            print(f"{time.monotonic() - started:6.0f} s  {done:7} requests of owners  {told}", flush=True)
        assert coming is not None
        figures = coming.result()
        if figures.broken:
            raise BrokenError(f"{len(figures.broken)} of the crowd's requests ended wrong: {figures.broken[0]}")
        return figures

    def _let_in(self, others: ProcessPoolExecutor, seconds: float) -> Future[Figures]:
        names = [f"crowd_{n}" for n in range(N_CROWD_POOLS)]
        for n, name in enumerate(names):
            self.proxy.pool(messages=[{"role": "system", "content": SYSTEM.format(n)}], name=name)
        return others.submit(crowd, self.proxy.served.url, names, BODY_LIMIT, self.n_crowd, seconds)

    def _own(self, owner: Owner) -> None:
        while not self.over.is_set():
            owner.act()

    def _guarded(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # it is raised again by who waits
                self.broken.append(error)
                self.over.set()

        return threading.Thread(target=run)

    def _raise(self) -> None:
        if self.broken:
            raise self.broken[0]


def seen_by(watchers: Iterable[Watcher]) -> Counter[str]:
    found = Counter[str]()
    for watcher in watchers:
        found[type(watcher).__name__.lower()] += watcher.n_seen
    return found


def give_back(proxy: Product) -> None:
    """Release everything; then nobody holds anything."""
    proxy.settled()
    for session in proxy.get("/polykv/sessions")["sessions"]:
        proxy.http.delete(f"/polykv/sessions/{session['session_id']}")
    for pool in proxy.get("/polykv/pools")["pools"]:
        proxy.http.delete(f"/polykv/pools/{pool['pool_id']}")
    proxy.settled()
    left = {key: proxy.get("/polykv/capacity")[key] for key in ("seq_ids_used", "n_requests", "n_sessions")}
    state = proxy.engine.state()
    if any(left.values()) or state["seqs"] or any(slot["session"] for slot in state["slots"]):
        raise BrokenError(f"something is left: {left}, {state}")


def verdicts(outcome: Outcome) -> list[str]:
    """What a shared machine can spoil, and a test therefore does not judge: none, where all is as it should be."""
    found, net_s = [], quantile(outcome.pulse.net_s, 99)
    if net_s > GOAL_S:
        found.append(f"/polykv/health: p99 {net_s:.3f} s without waiting for a processor; the goal is {GOAL_S} s")
    if not min(outcome.crowd.served.values()):
        found.append("there are clients who never had an answer")
    if outcome.crowd.unfair > MOST_UNFAIR:
        found.append(f"somebody waited {outcome.crowd.unfair:.1f} times the median of that time, more than {MOST_UNFAIR}")
    return found


def report(outcome: Outcome) -> None:
    for (what, status), n in sorted(outcome.counts.items()):
        print(f"  {what:14} {status or 'left':4} {n}")
    print("seen: " + ", ".join(f"{n} by {who}s" for who, n in outcome.seen.items()))
    print(f"{N_CROWD} clients on {N_SLOTS} slots: {outcome.crowd.told()}")
    print(outcome.pulse.told())


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    long = parser.add_mutually_exclusive_group()
    long.add_argument("--seconds", type=float, default=1800, help="how long (default 1800)")
    long.add_argument("--minutes", type=float, help="the same in minutes")
    on = parser.add_mutually_exclusive_group()
    on.add_argument("--engine", type=Path, default=Path(__file__).parents[2] / "llamafile", help="the engine binary")
    on.add_argument("--fake", action="store_true", help="on the fake engine, which spends no time in computing")
    options = parser.parse_args()
    seconds = options.seconds if options.minutes is None else options.minutes * 60
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="polykv-soak-") as folder:
            on_what = soak_engines.fake(Path(folder)) if options.fake else soak_engines.real(options.engine, Path(folder))
            with on_what as (proxy, engine_pid):
                outcome = Soak(proxy, engine_pid, seconds, N_CROWD).run()
    except BrokenError as error:
        print(f"broken: {error}", file=sys.stderr)
        return 1
    print(f"no request was lost, nothing grew and nothing is left after {time.monotonic() - started:.0f} s: "
          f"{sum(outcome.counts.values())} requests")  # fmt: skip
    report(outcome)
    found = verdicts(outcome)
    for verdict in found:
        print(f"short of the goal: {verdict}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
