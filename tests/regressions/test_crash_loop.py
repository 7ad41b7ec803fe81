"""An engine that dies again and again is started with growing pauses; meanwhile health and refusals say why, and then it serves."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.fakes.product import product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

POOL = list(range(600, 700))
BROKEN = (2, 3)
"""Starts that end at once; the first and the fourth are good."""
SCRIPT = """#!/bin/sh
case "$*" in *--help*) exec {engine} "$@";; esac
n=$(( $(cat {folder}/starts 2>/dev/null || echo 0) + 1 )); echo $n >{folder}/starts
case " {broken} " in *" $n "*) echo "error: the model is away, start $n"; exit 3;; esac
exec {engine} "$@"
"""


def test_it_is_said_and_it_ends(engine_path: Path, tmp_path: Path) -> None:
    """Three deaths: pauses double, whoever asks is told why, and the pool is back with the fourth start."""
    engine = tmp_path / "engine"
    engine.write_text(SCRIPT.format(engine=engine_path, folder=tmp_path, broken=" ".join(map(str, BROKEN))))
    engine.chmod(0o755)
    with product(engine, tiny_model("full"), tmp_path, args=["-c", 2048, "-np", 2]) as proxy:
        made = proxy.pool(tokens=POOL, name="p")
        psutil.Process(proxy.get("/polykv/health")["pid"]).kill()
        pauses: dict[int, float] = {}
        reasons: dict[int, str] = {}
        refusals: list[tuple[str, int]] = []
        while (health := proxy.get("/polykv/health"))["state"] != "ready" or not health["restarts"]:
            if health["state"] == "failed" and health["retry_ts"] is not None:
                pauses[health["restarts"]] = round(health["retry_ts"] - health["since_ts"], 1)
                reasons[health["restarts"]] = health["reason"]
                reply = proxy.http.post("/completion", json={"prompt": [*POOL, 7], "n_predict": 1, "pool_id": "p"})
                if reply.status_code == 503:
                    refusals.append((reply.json()["error"]["code"], int(reply.headers["retry-after"])))
                assert proxy.http.get("/polykv/pools").json()["pools"][0]["residency"] in {"lost", "resident"}
        assert pauses == {0: 0.5, 1: 1.0, 2: 2.0}
        assert reasons[0] == "the engine was killed by SIGKILL"
        assert reasons[1] == reasons[2] == "the engine exited with code 3 before it was ready"
        assert {code for code, _ in refusals} <= {"engine_unavailable", "engine_starting"}
        assert min(wait for _, wait in refusals) >= 1
        assert health["restarts"] == len(BROKEN) + 1
        proxy.until(lambda: proxy.get("/polykv/health")["pools"]["state"] == "on")
        again = proxy.http.post("/completion", json={"prompt": [*POOL, 7], "n_predict": 1, "pool_id": "p"})
        assert (again.headers["x-pool-id"], again.headers["x-cached-prefix-tokens"]) == (str(made["pool_id"]), str(len(POOL)))
