"""F003: an engine that takes requests and then does nothing at all; they end, and the engine is replaced."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

TOKENS = list(range(600, 640))


def wait_for_another(proxy: Product, pid: int) -> None:
    proxy.until(lambda: (now := proxy.get("/polykv/health"))["state"] == "ready" and now["pid"] != pid)


def test_requests_of_a_stopped_engine_end_and_the_next_one_serves(engine_path: Path, tmp_path: Path) -> None:
    """The process is stopped: a stream, an answer and a pooled turn end; it does not answer /health, so it is replaced."""
    options = ["--no-progress-s", "2", "--stop-grace-s", "0.2"]
    with product(engine_path, tiny_model("full"), tmp_path, *options, args=["-c", 1024, "-np", 4]) as proxy:
        proxy.pool(tokens=TOKENS, name="p")
        pid = proxy.get("/polykv/health")["pid"]
        os.kill(pid, signal.SIGSTOP)
        bodies = [{}, {"stream": True}, {"pool_id": "p", "session_id": "s"}]
        with ThreadPoolExecutor(3) as threads:
            got = list(
                threads.map(lambda more: proxy.http.post("/completion", json={"prompt": TOKENS, "n_predict": 4, **more}), bodies)
            )
        assert [reply.status_code for reply in got] == [504] * 3
        assert {reply.json()["error"]["code"] for reply in got} == {"engine_no_progress"}
        wait_for_another(proxy, pid)
        health = proxy.get("/polykv/health")
        assert (health["restarts"], health["no_progress"]["n_ended"]) == (1, 3)
        proxy.until(lambda: (now := proxy.http.get("/polykv/capacity")).is_success and now.json()["n_requests"] == 0)
        again = proxy.http.post("/completion", json={"prompt": [*TOKENS, 700], "n_predict": 4, "pool_id": "p"})
        assert again.json()["tokens_predicted"] == 4
        assert proxy.http.delete("/polykv/pools/p").json()["released"] is True


@pytest.mark.parametrize("which", ["engine_path", "twin_path"])
def test_an_engine_at_work_is_left_alone(which: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One slot, a long answer and others queued behind it for longer than the limit: all end by themselves."""
    args = ["-c", 4096, "-np", 1, "--no-context-shift"]
    body = {"prompt": TOKENS, "n_predict": 3000, "ignore_eos": True}
    with product(request.getfixturevalue(which), tiny_model("full"), tmp_path, "--no-progress-s", "2", args=args) as proxy:
        with ThreadPoolExecutor(3) as threads:
            got = list(threads.map(lambda _: proxy.http.post("/completion", json=body), range(3)))
        assert [reply.status_code for reply in got] == [200] * 3, [reply.text[:300] for reply in got]
        assert [reply.json()["tokens_predicted"] for reply in got] == [3000] * 3
        facts = proxy.get("/polykv/health")["no_progress"]
        assert (facts["evidence"], facts["n_ended"]) == ("state" if which == "engine_path" else "slots", 0)
        print(f"{which}: {sum(reply.json()['timings']['predicted_ms'] for reply in got) / 1000:.1f} s at work")
