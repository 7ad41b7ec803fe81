"""Engines that share one real GPU by weight: proportions, the sum beside one alone, stalls, and what a leaver leaves.

Law: nothing but Python's own library, and no import of this repository: the file travels with the engine. The engines find each
other by the device, without a key. Tables while it goes, one JSON line last; exit status 1 when a goal was missed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

START_S = 120.0
SETTLE_S = 1.0
"""Until all have seen each other at work."""
WEIGHTS: Sequence[tuple[float, ...]] = ((1, 1), (2, 1), (3, 1), (2, 1, 1))
KEY = "device-check"
N_WORDS = 900
"""A generation; then the next one begins. Contexts hold it."""


class Socket(http.client.HTTPConnection):
    """To a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=START_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(START_S)
        self.sock.connect(str(self.path))


class Engine:
    """One engine on the GPU. `arrivals` are the times of the tokens of `generate`, all streams together."""

    def __init__(self, program: Path, model: Path, folder: Path, weight: float, *, shared: bool, n_streams: int) -> None:
        self.n_streams, self.arrivals = n_streams, list[float]()
        self.socket, self.log = folder / f"{id(self)}.sock", folder / f"{id(self)}.log"
        env = os.environ | {"LLAMA_ARG_GPU_SHARE": "on" if shared else "off", "LLAMA_ARG_GPU_SHARE_WEIGHT": f"{weight:g}"}
        env |= {"LLAMA_ARG_POLYKV_KEY": KEY}
        words = [
            program.resolve(),
            "--host",
            self.socket,
            "-m",
            model,
            "-ngl",
            99,
            "-c",
            2048 * n_streams,
            "-np",
            n_streams,
            "--cache-ram",
            0,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(list(map(str, words)), stdout=log, stderr=subprocess.STDOUT, env=env)

    def wait_ready(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if self.socket.exists() and self.ask("GET", "/health")[0] == http.client.OK:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise SystemExit(f"an engine did not start:\n{self.log.read_text(errors='replace')[-4000:]}")

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        with closing(Socket(self.socket)) as wire:
            wire.request(method, path, json.dumps(body) if body else None, {"x-polykv-key": KEY})
            reply = wire.getresponse()
            return reply.status, reply.read()

    def generate(self, until: threading.Event, n_prompt: int = 8) -> None:
        """One generation after the other on one stream."""
        seed = 300
        while not until.is_set():
            seed += 1
            prompt = [300 + (seed * 7919 + i * 104729) % 40000 for i in range(n_prompt)]
            body = {"prompt": prompt, "n_predict": N_WORDS if n_prompt < N_WORDS else 1, "stream": True, "ignore_eos": True}
            with closing(Socket(self.socket)) as wire, suppress(OSError, http.client.HTTPException):  # it may be killed
                wire.request("POST", "/completion", json.dumps(body | {"cache_prompt": False, "temperature": 0}))
                reply = wire.getresponse()
                while not until.is_set() and (line := reply.readline()):
                    if line.startswith(b"data: {"):
                        self.arrivals.append(time.perf_counter())

    def state(self) -> dict[str, object]:
        return json.loads(self.ask("GET", "/_polykv/v1/state")[1])["gpu_share"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def at_work(engines: Sequence[Engine], n_prompt: Sequence[int] = ()) -> Iterator[Callable[[int], None]]:
    """All generate; calling what is yielded ends one of them."""
    ends = [threading.Event() for _ in engines]
    lengths = n_prompt or [8] * len(engines)
    threads = [
        threading.Thread(target=engine.generate, args=(end, length))
        for engine, end, length in zip(engines, ends, lengths, strict=True)
        for _ in range(engine.n_streams)
    ]
    for thread in threads:
        thread.start()
    try:
        time.sleep(SETTLE_S)
        yield lambda n: ends[n].set()
    finally:
        for end in ends:
            end.set()
        for thread in threads:
            thread.join()


def period_ms(weights: Sequence[float]) -> tuple[list[float], float]:
    """Shares and period of the engines' schedule (docs/gpu-share.md): none below a tenth, 40 ms for the smallest."""
    parts = [weight / sum(weights) for weight in weights]
    return parts, min(400.0, max(80.0, 40.0 / min(parts)))


def seen(engine: Engine, begin: float, end: float) -> tuple[float, list[float]]:
    """Tokens a second, and the gaps between steps in ms: streams of one step arrive together."""
    times = sorted(at for at in engine.arrivals if begin <= at <= end)
    gaps = [(b - a) * 1000 for a, b in pairwise(times)]
    return len(times) / (end - begin), gaps or [0.0]


def watch(engines: Sequence[Engine], seconds: float) -> list[tuple[float, list[float]]]:
    with at_work(engines):
        begin = time.perf_counter()
        time.sleep(seconds)
        end = time.perf_counter()
    return [seen(engine, begin, end) for engine in engines]


class Report:
    """Rows for people, goals for the JSON line."""

    def __init__(self) -> None:
        self.goals: dict[str, dict[str, object]] = {}

    def goal(self, name: str, wanted: str, measured: float, *, met: bool) -> None:
        self.goals[name] = {"goal": wanted, "measured": round(measured, 4), "met": met}
        print(f"  {'met   ' if met else 'MISSED'} {name} {wanted}: {measured:.3f}", flush=True)

    def end(self) -> int:
        ok = all(goal["met"] for goal in self.goals.values())
        print(json.dumps({"bench": "gpu_device", "goals": self.goals, "ok": ok}))
        return 0 if ok else 1


def proportions(report: Report, paced: Sequence[Engine], free: Sequence[Engine], weights: Sequence[float], seconds: float) -> None:
    """Solo, paced, free, paced, solo; so a drift of the clocks cancels."""
    name = "_".join(f"{weight:g}" for weight in weights)
    parts, period = period_ms(weights)
    seconds = round(seconds * 1000 / period + 0.5) * period / 1000
    for engine, weight in zip(paced, weights, strict=True):
        status, said = engine.ask("POST", "/_polykv/v1/gpu", {"weight": weight})
        if status != http.client.OK:
            raise SystemExit(f"a weight was refused: {said.decode()}")
    runs: dict[str, list[list[tuple[float, list[float]]]]] = {side: [] for side in ("solo", "paced", "free")}
    chosen = {"solo": free[:1], "paced": paced, "free": free[: len(paced)]}
    for side in ("solo", "paced", "free", "paced", "solo"):
        runs[side].append(watch(chosen[side], seconds))
    rates = [median(run[n][0] for run in runs["paced"]) for n in range(len(paced))]
    solo = median(run[0][0] for run in runs["solo"])
    step = 1000 * paced[0].n_streams / solo
    print(f"weights {name}, {paced[0].n_streams} streams, step {step:.2f} ms, solo {solo:.0f} tokens/s")
    for side in ("paced", "free"):
        for n in range(len(paced)):
            gaps = sorted(gap for run in runs[side] for gap in run[n][1])
            rate = median(run[n][0] for run in runs[side])
            shown = " ".join(f"{gaps[min(len(gaps) - 1, int(part * len(gaps)))]:.1f}" for part in (0.5, 0.95, 1.0))
            print(f"  {side} {n}: {rate:.1f} tokens/s, {rate / solo:.2f} of solo; gaps p50 p95 max: {shown} ms")
    error = max(abs(rates[n] / rates[-1] / (parts[n] / parts[-1]) - 1) for n in range(len(paced) - 1))
    report.goal(f"ratio_error_{name}_x{paced[0].n_streams}", "<= 0.05", error, met=error <= 0.05)
    total = sum(rates) / solo
    report.goal(f"aggregate_of_solo_{name}_x{paced[0].n_streams}", ">= 0.97", total, met=total >= 0.97)
    for n, part in enumerate(parts):
        bound = (1 - part) * period + step + 1
        stalls = sorted(gap for run in runs["paced"] for gap in run[n][1] if gap > bound / 2) or [0.0]
        stall = stalls[int(0.95 * (len(stalls) - 1))]
        report.goal(f"stall_ms_{name}_x{paced[0].n_streams}_peer{n}", f"<= {bound:.1f}", stall, met=stall <= bound)


def prompts_beside(report: Report, pair: Sequence[Engine], seconds: float) -> None:
    """One computes prompts of 1,500 tokens without end, the other generates: an overshoot is a longer stall of the other."""
    for engine in pair:
        engine.ask("POST", "/_polykv/v1/gpu", {"weight": 1})
    with at_work(pair, [8, 1500]):
        begin = time.perf_counter()
        time.sleep(seconds)
        _, gaps = seen(pair[0], begin, time.perf_counter())
    stalls = sorted(gap for gap in gaps if gap > 20) or [0.0]
    stall = stalls[int(0.95 * (len(stalls) - 1))]
    print(f"prompts beside a generation, 1:1: stalls p50 {median(stalls):.1f} ms, p95 {stall:.1f} ms, longest {max(gaps):.1f} ms")
    report.goal("stall_ms_beside_prompts", "<= 60", stall, met=stall <= 60)  # 40 ms, and half a window of one batch


def leaving(report: Report, pair: Sequence[Engine]) -> None:
    """How long until the one that stays has the device to itself: the other goes idle, and is killed."""
    for what, limit in (("idle", 2.1), ("kill", 3.1)):
        with at_work(pair) as leave:
            begin = time.perf_counter()
            if what == "kill":
                pair[1].process.send_signal(signal.SIGKILL)
            leave(1)
            time.sleep(5)
            times = sorted(at for at in pair[0].arrivals if at >= begin)
        free = max((b - begin for a, b in pairwise(times) if (b - a) * 1000 > 30), default=0.0)
        print(f"the other {'goes idle' if what == 'idle' else 'is killed'}: the device is free after {free:.2f} s")
        report.goal(f"solo_again_s_{what}", f"<= {limit}", free, met=free <= limit)


def main() -> int:
    parser = argparse.ArgumentParser(description="GPU share on a real GPU")
    parser.add_argument("engine", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each trial (default 4)")
    given = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="gpu-device-") as name:
        for n_streams in (1, 4):
            with ExitStack() as stack:

                def start(*, shared: bool, n_streams: int = n_streams, stack: ExitStack = stack) -> Engine:
                    made = Engine(given.engine, given.model, Path(name), 1, shared=shared, n_streams=n_streams)
                    stack.callback(made.close)
                    return made

                paced, free = [start(shared=True) for _ in range(3)], [start(shared=False) for _ in range(3)]
                for engine in (*paced, *free):
                    engine.wait_ready()
                found = [engine.state() for engine in paced]
                if not all(one["enabled"] for one in found) or len({one["gpu_key"] for one in found}) > 1:
                    raise SystemExit(f"the engines share no device: {found}")
                print(f"three engines on device {found[0]['gpu_key']}")
                for weights in WEIGHTS if n_streams == 1 else WEIGHTS[1:2]:
                    proportions(report, paced[: len(weights)], free, weights, given.seconds)
                if n_streams == 1:
                    prompts_beside(report, paced[:2], given.seconds)
                    leaving(report, paced[:2])
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
