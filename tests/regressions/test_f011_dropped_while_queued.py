"""F011: clients that drop their queued requests never touch the one that runs, and leave no reference to pool or session (F028)."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tests.fakes.product import leave, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

N_TOKENS = 1200
POOL = list(range(600, 700))
ASK_A = {
    "messages": [{"role": "user", "content": "Tell me everything."}],
    "max_tokens": N_TOKENS,
    "ignore_eos": True,
    "stream": True,
    "session_id": "a",
}
ASK_B = {"prompt": [*POOL, 1], "n_predict": 5, "pool_id": "p", "session_id": "b"}


def test_the_running_stream_delivers_everything(engine_path: Path, tmp_path: Path) -> None:
    """One slot: five queued requests are dropped by close and by reset; A delivers all its tokens, finish reason and end marker."""
    with product(engine_path, tiny_model("full"), tmp_path, args=["-c", 4096, "-np", 1, "--jinja"]) as proxy:
        proxy.pool(tokens=POOL, name="p")
        events: list[str] = []
        gaps: list[float] = []

        def run() -> None:
            last = 0.0
            with proxy.http.stream("POST", "/v1/chat/completions", json=ASK_A) as stream:
                for line in stream.iter_lines():
                    now = time.monotonic()
                    gaps.append(now - last if last else 0.0)
                    last = now
                    events.extend([line[6:]] if line.startswith("data: ") else [])

        running = threading.Thread(target=run)
        running.start()
        proxy.until(lambda: proxy.get("/polykv/capacity")["slots_busy"] == 1)
        for n in range(5):
            queued = proxy.ask_and_wait("/completion", json.dumps(ASK_B).encode())
            proxy.until(lambda: proxy.get("/polykv/health")["requests_running"] == 2)
            assert proxy.get("/polykv/sessions/b")["state"] == "warming"
            leave(queued, reset=n % 2 == 0)
            proxy.until(lambda: proxy.get("/polykv/health")["requests_running"] == 1)
        assert running.is_alive(), "A was to run while the others were dropped"
        running.join()
        print(f"longest gap in A: {max(gaps):.3f} s")

        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert not any("error" in chunk for chunk in chunks)
        assert [reason for chunk in chunks for one in chunk["choices"] if (reason := one["finish_reason"])] == ["length"]
        assert chunks[-1]["timings"]["predicted_n"] == N_TOKENS
        proxy.settled()
        shown = proxy.get("/polykv/sessions/b")
        assert (shown["state"], shown["n_streams"], shown["n_turns"]) == ("idle", 0, 5)
        assert proxy.get("/polykv/pools/p")["n_running"] == 0
        late = proxy.http.post("/completion", json=ASK_B)
        assert late.headers["x-cached-prefix-tokens"] == str(len(POOL))
        assert proxy.http.delete("/polykv/pools/p").json()["released"] is True
