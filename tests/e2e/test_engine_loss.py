"""The engine dies, or the proxy does: what clients see, and what is left of the other."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.proxy_process import Served

pytestmark = pytest.mark.engine

STREAM = {"prompt": "Once upon a time", "n_predict": 400, "ignore_eos": True, "stream": True}


def _health(served: Served) -> dict[str, object]:
    return dict(httpx.get(served.url + "/polykv/health", trust_env=False, verify=False).json())


def _until_ready(served: Served, boots: int) -> dict[str, object]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        health = _health(served)
        if health["state"] == "ready" and health["boots"] == boots:
            return health
        time.sleep(0.05)
    pytest.fail(f"the engine did not come back: {health}")


@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGKILL])
def test_a_crash_in_mid_stream_is_an_error_event_and_then_a_restart(
    twin_path: Path, smollm2: Path, tmp_path: Path, signum: int
) -> None:
    """The stream ends with one valid error event; meanwhile 503 with Retry-After; then the first request works."""
    with Served(twin_path, smollm2, tmp_path) as served:
        pid = int(str(served.health["pid"]))
        with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as client:
            events: list[dict[str, object]] = []
            with client.stream("POST", "/completion", json=STREAM) as got:
                for line in got.iter_lines():
                    if line.startswith("data: "):
                        events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) == 3:
                        os.kill(pid, signum)
            assert "error" in events[-1]
            assert sum("error" in event for event in events) == 1
            while (between := client.get("/props")).status_code == 200 and _health(served)["boots"] == 1:
                pass
            if between.status_code == 503:
                assert int(between.headers["retry-after"]) >= 1
            health = _until_ready(served, 2)
            assert health["restarts"] == 1
            assert client.post("/completion", json={"prompt": "x", "n_predict": 1}).status_code == 200
        assert not psutil.pid_exists(pid)
        assert served.stop() == 0


def test_a_killed_proxy_takes_the_engine_along(twin_path: Path, smollm2: Path, tmp_path: Path) -> None:
    """kill -9 of the proxy while it serves: the engine is gone and a new proxy starts at once with the same state folder."""
    with Served(twin_path, smollm2, tmp_path) as served:
        engine = psutil.Process(int(str(served.health["pid"])))
        served.process.kill()
        served.process.wait()
        engine.wait(10)
        with Served(twin_path, smollm2, tmp_path) as again:
            assert not Path(served.socket).parent.exists()
            assert again.stop() == 0


def test_a_second_signal_is_no_crash(engine_path: Path, smollm2: Path, tmp_path: Path) -> None:
    """Ctrl-C twice while a stream runs: exit code 130, and nothing is said that looks like trouble."""
    with Served(engine_path, smollm2, tmp_path) as served, httpx.Client(base_url=served.url, trust_env=False, timeout=60) as client:
        assert served.process.stderr is not None
        with client.stream("POST", "/completion", json=STREAM) as got:
            lines = got.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGINT)
            said = served.process.stderr.readline()
            assert "once more to stop at once" in said
            served.process.send_signal(signal.SIGINT)
            assert any("draining" in line for line in lines)
        said += served.process.stderr.read()
        assert served.process.wait(60) == 130
        assert not {"ERROR", "WARNING", "Traceback"}.intersection(said.split()), said


def test_keys_and_prefix_reach_engine_and_verbs(engine_path: Path, smollm2: Path, tmp_path: Path) -> None:
    """With an API key and a path prefix the engine's routes, our verbs and our own calls work; without the key none does."""
    args = ("-c", "1024", "-t", "1", "--api-prefix", "/llm")
    with Served(engine_path, smollm2, tmp_path, "--api-key", "alpha,beta", args=args, key="alpha") as served:
        with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as client:
            beta = {"authorization": "Bearer beta"}
            assert client.get("/llm/props").status_code == 401
            assert client.get("/llm/props", headers=beta).json()["total_slots"] == 4
            assert client.get("/polykv/pools").status_code == 401
            made = client.post("/polykv/pools", json={"prompt": "The quick brown fox jumps over it.", "name": "fox"}, headers=beta)
            assert made.status_code == 201, made.text
            body = {"prompt": "The quick brown fox jumps over it. And", "n_predict": 1, "pool_id": "fox"}
            got = client.post("/llm/completion", json=body, headers=beta)
            assert int(got.headers["x-cached-prefix-tokens"]) > 0
            assert "last_lines" not in client.get("/polykv/health").json()
            assert "alpha" not in str(client.get("/polykv/health", headers=beta).json())
        assert served.stop() == 0
