"""F028: clients of the whole product that leave at any moment of an attach leave no hold on the pool."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.fakes.product import leave, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

POOL = list(range(600, 700))
ASK = {"prompt": [*POOL, 1], "n_predict": 3, "pool_id": "p", "session_id": "s", "shared_prefix_n_tokens": 100}
LONG = {"prompt": [1, 2, 3], "n_predict": 1000, "ignore_eos": True}


def test_the_pool_can_be_released_after_all_have_left(engine_path: Path, tmp_path: Path) -> None:
    """40 clients leave after 0 to 3 questions to the proxy, by close and by reset, beside a busy slot and beside an idle one."""
    with product(engine_path, tiny_model("full"), tmp_path, args=["-c", 2048, "-np", 1, "--cache-ram", 0]) as proxy:
        proxy.pool(tokens=POOL, name="p")
        for busy in (True, False):
            other = threading.Thread(target=lambda busy=busy: proxy.http.post("/completion", json=LONG) if busy else None)
            other.start()
            for n in range(20):
                client = proxy.ask_and_wait("/completion", json.dumps(ASK).encode())
                for _ in range(n % 4):
                    proxy.get("/polykv/health")
                leave(client, reset=n % 2 == 0)
            other.join()
        proxy.settled()
        shown = proxy.get("/polykv/pools/p")
        assert (shown["n_running"], shown["residency"], shown["sessions"][0]["state"]) == (0, "resident", "idle")
        assert proxy.http.post("/completion", json=ASK).headers["x-cached-prefix-tokens"] in {"0", "100"}, (
            "0: its own cells do as well"
        )
        assert proxy.http.delete("/polykv/sessions/s").json()["cancelled"] == 0
        assert proxy.http.delete("/polykv/pools/p").json()["released"] is True
        capacity = proxy.get("/polykv/capacity")
        assert [capacity[key] for key in ("seq_ids_used", "cells_used", "n_requests", "n_sessions")] == [0, 0, 0, 0]
