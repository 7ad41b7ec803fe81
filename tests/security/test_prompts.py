"""What people ask is in no log of ours, at any level, and in no title."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.fake_engine_program import WithFakeEngine

MARK = "zebra-on-a-unicycle"


def _use(http: httpx.Client) -> None:
    """Every way in which a text gets into the proxy, right and wrong."""
    chat = {"messages": [{"role": "system", "content": MARK}, {"role": "user", "content": MARK}]}
    pools = [{"prompt": f"{MARK} one two", "name": "p"}, {"messages": [{"role": "system", "content": MARK}], "name": "q"}]
    made = [http.post("/polykv/pools", json=pool).status_code for pool in pools]
    assert made == [201, 201]
    http.post("/polykv/pools/p/fork", json={"prompt": f"{MARK} one two three", "name": "f"})
    http.post("/polykv/pools", json={"prompt": MARK, "nonsense": MARK})
    http.post("/polykv/pools", content=f'{{"prompt": "{MARK}')
    http.post("/polykv/pools", json={"name": MARK.upper(), "prompt": MARK})
    for body in ({"prompt": MARK}, {"prompt": f"{MARK} one two x", "pool_id": "p"}, {"prompt": MARK, "session_id": "s"}):
        assert http.post("/completion", json=body).status_code == 200
    assert http.post("/completion", json={"prompt": f"{MARK} one two y", "pool_id": "p", "stream": True}).status_code == 200
    assert http.post("/v1/chat/completions", json={**chat, "session_id": "s"}).status_code == 200
    http.post("/v1/chat/completions", json={**chat, "pool_id": [MARK]})
    http.post("/v1/chat/completions", json={**chat, "session_id": MARK * 20})
    http.post("/completion", json={"prompt": MARK, "pool_id": MARK})
    http.post(f"/completion?q={MARK}", content=f'{{"prompt": "{MARK}", "pool_id"', headers={"x-other": MARK})
    http.post("/polykv/match", json={"route": "/v1/chat/completions", "body": chat})
    http.get(f"/polykv/pools/p/text?q={MARK}")
    http.post("/polykv/pools/p/compact", json={"prompt": MARK})
    http.post("/polykv/pools/p/evict")
    http.post("/completion", json={"prompt": f"{MARK} one two z", "pool_id": "p"})  # which makes it anew
    http.post("/v1/embeddings", json={"input": MARK})


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_prompt_is_in_a_log(form: str, tmp_path: Path) -> None:
    """At debug level, with a line for each request; in JSON every line of standard error is an object."""
    options = ("--log-level", "debug", "--log-format", form, "--access-log", "--kv-disk-bytes", "1MiB")
    with WithFakeEngine.running(tmp_path, *options) as served:
        with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as http:
            _use(http)
            psutil.Process(served.health["pid"]).kill()
            http.post("/completion", json={"prompt": MARK})
            while http.get("/polykv/health").json()["restarts"] == 0:
                time.sleep(0.05)
        titles = " ".join(psutil.Process(served.process.pid).cmdline())
        assert served.stop() == 0
    assert MARK not in served.said.lower()
    assert MARK not in titles
    assert "/polykv/pools/p/compact" in served.said
    if form == "json":
        lines = [json.loads(line) for line in served.said.splitlines()]
        assert {line["logger"] for line in lines} >= {"polykv", "polykv.access"}
        assert {line["level"] for line in lines if line["message"].startswith("engine: ")} == {"error"}
