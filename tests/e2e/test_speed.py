"""Speeds through the whole proxy on the real engine: figures against a clock of the client's own, streams, pages, savings."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

N = 1500
POOL = [300 + n for n in range(40)]


@pytest.fixture(scope="module")
def proxy(engine_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    args = ("-c", 16384, "-np", 4, "-kvu", "--slots")
    with product(engine_path, tiny_model("full"), tmp_path_factory.mktemp("speed"), args=args) as running:
        yield running


class Watcher:
    """Collects the events of a stream of ours, until it is told to stop and one more comes."""

    def __init__(self, proxy: Product, path: str) -> None:
        self.seen: list[tuple[str, dict]] = []
        self._opened, self._done = threading.Event(), threading.Event()
        self._proxy, self._path = proxy, path
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> Watcher:
        self._thread.start()
        assert self._opened.wait(60)
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._proxy.http.post("/completion", json={"prompt": [1], "n_predict": 1})
        self._thread.join(60)

    def _follow(self) -> None:
        name = ""
        with self._proxy.http.stream("GET", self._path) as stream:
            self._opened.set()
            for line in stream.iter_lines():
                if self._done.is_set():
                    return
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self.seen.append((name, json.loads(line.removeprefix("data: "))))


def answer(proxy: Product, session: str, pool_id: int | None = None) -> tuple[float, dict]:
    """One long answer as a stream: tokens per second by our clock, and its last chunk."""
    body = {"prompt": [*POOL, 7], "n_predict": N, "stream": True, "ignore_eos": True, "temperature": 0, "session_id": session}
    arrivals, last = [], {}
    with proxy.http.stream("POST", "/completion", json={**body, **({"pool_id": pool_id} if pool_id else {})}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                arrivals.append(time.perf_counter())
                last = json.loads(line.removeprefix("data: "))
    return (N - 1) / (arrivals[N - 1] - arrivals[0]), last


def test_the_figures_are_those_of_a_clock_outside(proxy: Product) -> None:
    """While it runs the session is active with a figure; afterwards its turn's is that of the client's clock and of the reply."""
    with Watcher(proxy, "/polykv/tps?interval_ms=100") as watcher:
        outside, last = answer(proxy, "a")
        proxy.settled()
    row = proxy.get("/polykv/sessions/a")
    assert row["tps_last_turn"] == pytest.approx(last["opencoti"]["session_tps"], rel=0.001)
    assert row["tps_last_turn"] == pytest.approx(outside, rel=0.25), "a busy machine delays clients"
    assert last["opencoti"]["ctx_headroom_tokens"] == row["ctx_headroom_tokens"]
    assert watcher.seen[0][0] == "tps"
    active = [one for _, one in watcher.seen if one["n_active"]]
    assert all(one["mean_active_tps"] == one["sessions"][0]["tps_ewma"] for one in active)
    assert [one["seq"] for _, one in watcher.seen] == sorted(one["seq"] for _, one in watcher.seen)


def test_pages_and_savings_tell_of_the_same_session(proxy: Product) -> None:
    """The engine's slot page names it, the reply's head knows its pace, and what the pool spared is what the engine counted."""
    pool = proxy.pool(tokens=POOL, name="p")
    for turn in range(2):
        body = {"prompt": [*POOL, 9, turn], "n_predict": 40, "ignore_eos": True, "session_id": f"b{turn}", "pool_id": "p"}
        assert proxy.http.post("/completion", json=body).status_code == 200
        proxy.settled()
    spared = proxy.get("/polykv/pools/p")["savings"]
    assert (spared["n_requests"], spared["n_tokens"]) == (2, 2 * len(POOL))
    assert spared["seconds"] > 0
    assert proxy.get("/polykv/savings")["days"][-1]["pools"][0]["pool_id"] == pool["pool_id"]
    proxy.until(lambda: {slot["session_id"] for slot in proxy.get("/slots")} >= {"b0", "b1"})

    def of_b1() -> dict[str, Any]:
        return next(slot for slot in proxy.get("/slots") if slot["session_id"] == "b1")

    # the last figures of a turn come with the engine's next counters
    proxy.until(lambda: of_b1()["ctx_used"] == proxy.get("/polykv/sessions/b1")["ctx_used"] == len(POOL) + 41)
    slot = of_b1()
    assert slot["pool_id"] == pool["pool_id"]
    assert slot["n_ctx"] == slot["ctx_total"]
    again = proxy.http.post("/completion", json={"prompt": [5], "n_predict": 1, "session_id": "b1"})
    assert float(again.headers["x-session-tps"]) == pytest.approx(slot["tps_ewma"], abs=0.01)
    assert proxy.get("/props")["opencoti"]["polykv"]["prefix_sharing"] == "any"


def test_events_tell_the_story_of_a_request(proxy: Product) -> None:
    """In order, with what it took."""
    with Watcher(proxy, "/polykv/events?topics=request,session") as watcher:
        proxy.http.post("/completion", json={"prompt": [1, 2, 3], "n_predict": 5, "ignore_eos": True, "session_id": "c"})
        proxy.until(lambda: any(one["type"] == "released" for _, one in watcher.seen))
    requests = [one for name, one in watcher.seen if name == "request"]
    assert [one["type"] for one in requests] == ["launched", "first_token", "finished", "released"]
    last = requests[-1]
    assert (last["session_id"], last["n_decoded"], last["n_prompt"]) == ("c", 5, 3)
    assert last["tpot_ms"] > 0
    assert last["queue_ms"] <= last["ttft_ms"]
