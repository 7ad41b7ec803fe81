"""The engine has no memory left, in a request or at its start: whoever asked is told, the next engine serves, pools come back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.product import product
from tests.lengths import length
from tests.models import tiny_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(sys.platform != "linux", reason="a limit of the address space is set, and read from /proc"),
]

POOL = list(range(600, 700))
ARGS = ["-c", 2048, "-np", 2]
SPARE_KIB = 20_000
TOO_MUCH = 40_000_000
"""Bytes of a body. As JSON it takes several times that."""


def limited(engine: Path, folder: Path, kib: int) -> Path:
    """The engine with an address space of so much."""
    script = folder / "limited"
    ask = 'case "$*" in *--help*) ;; *) ulimit -v'
    script.write_text(f'#!/bin/sh\n{ask} {kib};; esac\nexec {engine} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def needs_kib(engine_path: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """What it takes at rest."""
    with product(engine_path, tiny_model("full"), tmp_path_factory.mktemp("memory"), args=ARGS) as proxy:
        lines = Path(f"/proc/{proxy.get('/polykv/health')['pid']}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmPeak:")))


def test_a_request_that_takes_all_memory(engine_path: Path, needs_kib: int, tmp_path: Path) -> None:
    """Dead or not, the engine's fault is its caller's 500 or 503; afterwards the pool is shared whole under its id."""
    engine = limited(engine_path, tmp_path, needs_kib + SPARE_KIB)
    with product(engine, tiny_model("full"), tmp_path, args=ARGS) as proxy:
        made = proxy.pool(tokens=POOL, name="p")
        bodies = [
            ("/completion", b'{"n_predict":1,"prompt":[' + b"1," * (TOO_MUCH // 4) + b"1]}"),
            ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "ab " * (TOO_MUCH // 3)}]}).encode()),
        ]
        for path, body in bodies[: length(1, 2)]:
            reply = proxy.http.post(path, content=body)
            assert reply.status_code in {500, 503}, reply.text[:300]
            proxy.until(lambda: proxy.http.post("/completion", json={"prompt": [1, 2], "n_predict": 1}).status_code == 200)
            proxy.until(lambda: proxy.get("/polykv/health")["pools"]["state"] == "on")
            again = proxy.http.post("/completion", json={"prompt": [*POOL, 7], "n_predict": 2, "pool_id": "p"})
            assert (again.status_code, again.headers["x-pool-id"]) == (200, str(made["pool_id"]))
            assert again.headers["x-cached-prefix-tokens"] == str(len(POOL))
            proxy.settled()
            assert proxy.get("/polykv/health")["requests_running"] == 0


def test_a_start_without_enough_memory(engine_path: Path, needs_kib: int, tmp_path: Path) -> None:
    """Exit code 1, and the engine's own last words."""
    engine = limited(engine_path, tmp_path, needs_kib // 5)
    command = [sys.executable, "-m", "polykv_proxy.cli", "--engine", engine, "-m", tiny_model("full"), "--port", "0"]
    done = subprocess.run(
        [*command, "--state-dir", tmp_path / "state", "--", *map(str, ARGS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "error: the engine" in done.stderr
    assert "before it was ready" in done.stderr
