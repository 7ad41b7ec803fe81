"""What the relay costs beside nginx and LiteLLM: small requests, event streams, memory, and what our extras add.

One scripted engine; nothing, nginx (one worker), LiteLLM (`--with litellm`), ours: one worker each, in turns (palindromes).
Engine, load and proxies are processes of their own. A proxy's processor time is told beside the times: other work on the machine
hardly adds to it. `--part libraries` compares servers, loops and clients that a relay could be built from.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx

from bench.kit.report import Report
from bench.kit.rig import Options, run
from bench.proxies import installs, sides
from bench.proxies.rounds import SDK_FIELDS, Rounds, Seen, chat, requests, stream, streams
from bench.proxies.sides import Side, Stub

ADDED_P50_MS, NGINX_SHARE, LITELLM_TIMES, STALL_MS, GROWTH = 0.15, 0.5, 140.0, 20.0, 1.1
PARTS = ("requests", "streams", "extras", "libraries")
LIBRARIES = [
    ("httptools", "uvloop", "httpx"),
    ("httptools", "uvloop", "httpx2"),
    ("httptools", "uvloop", "aiohttp"),
    ("httptools", "uvloop", "ours"),
    ("h11", "asyncio", "ours"),
    ("httptools", "asyncio", "ours"),
    ("granian", "uvloop", "ours"),
    ("protocol", "asyncio", "ours"),
    ("protocol", "uvloop", "ours"),
]


def measure(report: Report, options: Options) -> None:
    with tempfile.TemporaryDirectory() as name, sides.stub(Path(name)) as engine:
        for part in options.more.part or PARTS[:3]:
            _PARTS[part](report, options, engine, Path(name) / part)


def measure_requests(report: Report, options: Options, engine: Stub, folder: Path) -> None:
    loads = [1, 16] if options.quick else [1, 16, 64, 256]
    seconds, n_blocks = (0.3, 1) if options.quick else (0.7, 5)
    seen = Rounds()
    with ExitStack() as stack:
        there = _sides(stack, report, engine, folder)
        for n in loads:
            requests(seen, n, there, chat(), n, seconds, n_blocks)
        requests(seen, "sdk", there, chat(fields=SDK_FIELDS), 16, seconds, n_blocks)
        if "litellm" in options.more.also:
            installs.install_litellm()
            slow = stack.enter_context(sides.litellm(engine, folder / "litellm", installs.litellm_python()))
            for n in loads:
                requests(seen, f"{n}, slower", [slow, there[-1]], chat(), n, 2 * seconds, 1)
                report.at_least(f"times_litellm_{n}", LITELLM_TIMES, seen.best_share(f"{n}, slower", "ours", "litellm"))
    _table(report, seen, "small requests, by connections; sdk: with the OpenAI client's fields, 16 connections")
    report.at_most("added_p50_1_ms", ADDED_P50_MS, seen.best_added(1, "ours", "p50_ms"))
    report.at_least("no_collapse", 0.8, min(seen.best_rate(n, "ours") for n in loads) / seen.best_rate(1, "ours"))
    for n in loads:
        report.metric(f"requests_{n}_per_s", seen.best_rate(n, "ours"))
        report.metric(f"requests_{n}_cpu_us", seen.median(n, "ours", "cpu_us"))
        report.metric(f"added_{n}_p50_ms", seen.best_added(n, "ours", "p50_ms"))
        report.metric(f"added_{n}_p99_ms", seen.best_added(n, "ours", "p99_ms"))
        has_nginx = sides.nginx_path() is not None
        report.at_least(f"share_of_nginx_{n}", NGINX_SHARE, seen.best_share(n, "ours", "nginx") if has_nginx else 0.0)


def measure_streams(report: Report, options: Options, engine: Stub, folder: Path) -> None:
    loads = [(16, 100)] if options.quick else [(64, 100), (256, 100)]
    seconds, n_blocks = (0.5, 1) if options.quick else (4.0, 2)
    with ExitStack() as stack:
        there = _sides(stack, report, engine, folder)
        seen = Rounds()
        for n, rate in loads:
            streams(seen, (n, rate), there, stream(rate, seconds), n, n_blocks)
        _table(report, seen, "streams, events a second each: delays of events")
        most = loads[-1]
        first, *_, last = seen.seen[most, "ours"]
        report.metric("events_cpu_s_per_million", seen.median(most, "ours", "cpu_us"))
        report.metric("stream_added_p50_ms", seen.best_added(most, "ours", "p50_ms"))
        report.metric("stream_added_p99_ms", seen.best_added(most, "ours", "p99_ms"))
        report.metric("stream_added_gap_p50_ms", seen.best_added(most, "ours", "gap_p50_ms"))
        report.metric("stream_added_gap_p99_ms", seen.best_added(most, "ours", "gap_p99_ms"))
        report.at_most("longest_delay_ms", STALL_MS, min(one.max_ms for one in seen.seen[most, "ours"]))
        report.at_most("memory_growth", GROWTH, last.rss_mib / first.rss_mib)
        report.metric("rss_mib", last.rss_mib)
        if not options.quick:
            _saturate(report, there)


def _saturate(report: Report, there: list[Side]) -> None:
    """64 streams, faster and faster, until events come late or not all in time."""
    rows = []
    for side in there:
        seen, best = Rounds(), 0.0
        for rate in (200, 300, 400, 500, 600, 800, 1000):
            streams(seen, rate, [side], stream(rate, 2), 64, 1)
            one: Seen = min(seen.seen[rate, side.name], key=lambda one: one.p99_ms)
            if one.p99_ms > 50 or one.rate < 0.95 * 64 * rate:
                break
            best = one.rate
        rows.append([side.name, f"{best:,.0f}"])
        report.metric(f"{side.name}_events_per_s_in_time", best)
    report.table("64 streams: events/s that still come within 50 ms (p99)", ["", "events/s"], rows)


def measure_extras(report: Report, options: Options, engine: Stub, folder: Path) -> None:
    seconds, n_blocks = (0.3, 1) if options.quick else (1.0, 4)
    folder.mkdir()
    with sides.ours(engine, folder / "on") as on, sides.ours(engine, folder / "off", "--off", name="off") as off:
        httpx.post(f"http://127.0.0.1:{on.port}/polykv/pools", json={"name": "clerk", "tokens": [1, 2, 3]}).raise_for_status()
        seen = Rounds()
        requests(seen, "all switched off (--off)", [off], chat(), 1, seconds, n_blocks)
        requests(seen, "names nothing", [on], chat(), 1, seconds, n_blocks)
        requests(seen, "names a session", [on], chat(more=b',"session_id":"agent-1"'), 1, seconds, n_blocks)
        requests(seen, "names a pool", [on], chat(more=b',"pool_id":"clerk"'), 1, seconds, n_blocks)
    rows = []
    for load, side in seen.seen:
        cpu, p50 = seen.median(load, side, "cpu_us"), seen.median(load, side, "p50_ms")
        rows.append([load, f"{p50:.3f}", f"{cpu:.0f}"])
        report.metric(f"extras_{str(load).split(' (')[0].replace(' ', '_')}_cpu_us", cpu)
    report.table("what a request asks of us, one connection", ["", "p50 ms", "CPU µs"], rows)


def compare_libraries(report: Report, options: Options, engine: Stub, folder: Path) -> None:
    installs.install_granian()
    seconds, n_blocks = (0.3, 1) if options.quick else (1.0, 2)
    chosen = LIBRARIES[-2:] if options.quick else LIBRARIES
    with ExitStack() as stack:
        there = [stack.enter_context(sides.contender(engine, *parts)) for parts in chosen]
        seen = Rounds()
        for n in (1, 16, 64):
            requests(seen, n, there, chat(), n, seconds, n_blocks)
        streams(seen, (64, 20), there, stream(20, 2), 64, 1)
    _table(report, seen, "small requests, by connections; (64, 20): 64 streams of 20 events a second")
    for side in there:
        report.metric(f"{side.name.replace(' + ', '_')}_cpu_us", seen.median(16, side.name, "cpu_us"))


def _sides(stack: ExitStack, report: Report, engine: Stub, folder: Path) -> list[Side]:
    folder.mkdir()
    there = [stack.enter_context(sides.direct(engine))]
    if sides.nginx_path() is None:
        report.say("nginx is not there and goes unmeasured: apt-get install nginx-light (Debian)")
    else:
        there.append(stack.enter_context(sides.nginx(engine, folder / "nginx")))
    there.append(stack.enter_context(sides.ours(engine, folder / "ours")))
    return there


def _table(report: Report, seen: Rounds, title: str) -> None:
    rows = []
    for load, side in sorted(seen.seen, key=lambda key: str(type(key[0]))):
        best = seen.best(load, side)
        rate, cpu, rss = (seen.median(load, side, what) for what in ("rate", "cpu_us", "rss_mib"))
        row = [
            load,
            side,
            f"{rate:,.0f}",
            f"{seen.best_rate(load, side):,.0f}",
            f"{best.p50_ms:.3f}",
            f"{best.p99_ms:.2f}",
            f"{best.max_ms:.1f}",
        ]
        rows.append([*row, f"{cpu:.1f}", f"{rss:.0f}"])
    head = ["load", "side", "a second", "best", "p50 ms", "p99 ms", "longest ms", "CPU µs each", "RSS MiB"]
    report.table(f"{title} (times: of the best trial)", head, rows)


_PARTS = {"requests": measure_requests, "streams": measure_streams, "extras": measure_extras, "libraries": compare_libraries}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--with", dest="also", action="append", choices=["litellm"], default=[], help="installed when first asked for"
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="this part alone; may be repeated (default: all but libraries)"
    )


if __name__ == "__main__":
    run("relay", __doc__, measure, _options)
