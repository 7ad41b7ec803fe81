"""`python -m examples.courier --floor 15`: some work against a running proxy, and a report of how it went."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

import httpx

from examples.courier.chart import draw
from examples.courier.courier import AllAtOnce, ByCapacity, Courier
from examples.courier.journal import Journal
from examples.courier.proxy import Proxy, TurnError
from examples.courier.work import RULES, packages


def main() -> None:
    """Exit code 1 where a package failed, or the proxy cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m examples.courier", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the proxy; its key is in POLYKV_API_KEY")
    parser.add_argument("--floor", type=float, required=True, help="tokens per second that each session is to have in the mean")
    parser.add_argument("--packages", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="turns of each package")
    parser.add_argument("--max-tokens", type=int, default=120, help="of an answer")
    parser.add_argument("--tools-s", type=float, default=1.0, help="seconds between two turns")
    parser.add_argument("--urgent", type=int, default=0, help="packages that start at once, whatever the floor says")
    parser.add_argument("--queue", action="store_true", help="ask for all at once, and let the proxy hold them in line")
    parser.add_argument("--out", type=Path, default=Path("courier-report"), help="folder of report.json and report.svg")
    given = parser.parse_args()
    try:
        journal = asyncio.run(run(given))
    except (httpx.HTTPError, TurnError) as error:
        sys.exit(f"the proxy at {given.url} cannot be used: {error}\nIs it running? --url says where it is looked for.")
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "report.json").write_text(json.dumps(journal.as_object(), indent=1))
    draw(journal, given.out / "report.svg")
    figures = journal.figures()
    for name, value in figures.items():
        print(f"{name:20} {'-' if value is None else f'{value:.3f}'.rstrip('0').rstrip('.')}")
    print(f"report: {given.out / 'report.svg'}, {given.out / 'report.json'}")
    sys.exit(1 if figures["failed"] else 0)


async def run(given: argparse.Namespace) -> Journal:
    """One run on a pool of its own, which goes afterwards."""
    key = os.environ.get("POLYKV_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=given.url, headers=headers, timeout=httpx.Timeout(30, read=None), limits=limits) as http:
        proxy = await Proxy.with_pool(http, RULES)
        try:
            line = {"mode": "enforced", "on_saturation": "queue", "max_queue": given.packages, "queue_timeout_ms": 3_600_000}
            await proxy.set_policy(target_tps_per_session=given.floor, **(line if given.queue else {}))
            journal = Journal(given.floor)
            pacing = AllAtOnce() if given.queue else ByCapacity()
            work = packages(given.packages, given.steps, n_urgent=given.urgent, max_tokens=given.max_tokens, tools_s=given.tools_s)
            await Courier(proxy, journal, RULES, pacing, name=f"courier-{time.time_ns()}").deliver(work)
        finally:
            await proxy.release()
    return journal


if __name__ == "__main__":
    main()
