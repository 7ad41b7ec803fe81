"""F062: the real engine crashes with running streams, queued requests and pools: each is told, nothing is pretended."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

NAMES = ("x", "y", "z")
BASE = list(range(600, 660))
POOLS = {"x": BASE, "y": [*BASE, *range(700, 720)], "z": [*BASE[:30], *range(800, 820)]}
"""`y` and `z` are forks of `x`, one at its end and one inside."""
LONG: dict[str, Any] = {"n_predict": 100_000, "ignore_eos": True, "n_probs": 0}


def stream(proxy: Product, name: str) -> list[dict[str, Any]]:
    """All events of a stream that does not end by itself."""
    body = {**LONG, "prompt": [*POOLS[name], 7], "stream": True, "pool_id": name, "session_id": f"run-{name}"}
    with proxy.http.stream("POST", "/completion", json=body) as reply:
        return [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]


def queue(proxy: Product, n: int) -> httpx.Response:
    """A request for which there is no slot."""
    return proxy.http.post("/completion", json={"prompt": [*POOLS["x"], 300 + n], "n_predict": 3, "pool_id": "x"})


def crash(proxy: Product, signum: int, workers: ThreadPoolExecutor) -> tuple[list[Future[Any]], list[Future[Any]]]:
    """Three streams and two queued requests; then the signal. What became of them."""
    pid = proxy.get("/polykv/health")["pid"]
    streams = [workers.submit(stream, proxy, name) for name in NAMES]
    proxy.until(lambda: proxy.get("/polykv/capacity")["slots_busy"] == 3)
    queued = [workers.submit(queue, proxy, n) for n in range(2)]
    proxy.until(lambda: proxy.get("/polykv/health")["requests_running"] == 5)
    process = psutil.Process(pid)
    os.kill(pid, signum)
    proxy.until(lambda: not process.is_running())
    return streams, queued


def test_each_crash_is_told_and_made_good(engine_path: Path, tmp_path: Path) -> None:
    """SEGV and ABRT in a row: error events, 503 or service, no zombie, pools rebuilt under their ids, restarts counted."""
    args = ["-c", 16384, "-np", 3, "-kvu"]
    with product(engine_path, tiny_model("full"), tmp_path, args=args) as proxy, ThreadPoolExecutor(5) as workers:
        made = {"x": proxy.pool(tokens=BASE, name="x")}
        for name in "yz":
            made[name] = (
                proxy.http.post("/polykv/pools/x/fork", json={"tokens": POOLS[name], "name": name}).raise_for_status().json()
            )
        for n, signum in enumerate((signal.SIGSEGV, signal.SIGABRT), start=1):
            boot = proxy.get("/polykv/health")["pools"]["boot_id"]
            streams, queued = crash(proxy, signum, workers)
            for one in streams:
                events = one.result()
                assert ["error" in event for event in events].index(True) == len(events) - 1
            for one in queued:
                reply = one.result()
                assert reply.status_code in {200, 503}
                assert reply.status_code == 200 or int(reply.headers["retry-after"]) >= 1
            proxy.until(lambda boot=boot: ready(proxy, boot))  # type: ignore[misc]
            assert proxy.get("/polykv/health")["restarts"] == n
            shown = {pool["name"]: pool for pool in proxy.get("/polykv/pools")["pools"]}
            assert {name: pool["pool_id"] for name, pool in shown.items()} == {name: pool["pool_id"] for name, pool in made.items()}
            n_resident = sum(pool["residency"] == "resident" for pool in shown.values())
            assert n_resident == proxy.get("/polykv/capacity")["seq_ids_used"]
            assert all(pool["residency"] in {"lost", "resident"} for pool in shown.values())
            for name, tokens in reversed(POOLS.items()):
                reply = proxy.http.post("/completion", json={"prompt": [*tokens, 8], "n_predict": 1, "pool_id": name})
                assert (reply.status_code, reply.headers["x-cached-prefix-tokens"]) == (200, str(len(tokens)))
            proxy.settled()
            assert {pool["residency"] for pool in proxy.get("/polykv/pools")["pools"]} == {"resident"}
            assert [session for session in proxy.get("/polykv/sessions")["sessions"] if session["state"] != "idle"] == []
        assert proxy.pool(tokens=[5, 6, 7])["pool_id"] == max(pool["pool_id"] for pool in made.values()) + 1


def ready(proxy: Product, boot_before: str) -> bool:
    health = proxy.get("/polykv/health")
    return health["state"] == "ready" and health["pools"].get("boot_id", boot_before) != boot_before
