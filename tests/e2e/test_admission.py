"""Admission through the whole product on the real engine: a floor that nobody can have lets in the guaranteed ones and no more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.driver import HANG_GUARD_S
from tests.engine.tree import tokens
from tests.fakes.product import Product, leave, product
from tests.fakes.proxy_process import Served
from tests.models import tiny_model

pytestmark = pytest.mark.engine

ROOT = tokens(200, 1)
FLOOR = {"target_tps_per_session": 1_000_000, "mode": "enforced", "settle_tokens": 8}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("admission")
    with product(request.getfixturevalue("engine_path"), tiny_model("full"), folder, args=("-c", 8192, "-np", 8)) as proxy:
        proxy.pool(tokens=ROOT)
        yield proxy


@pytest.fixture(autouse=True)
def at_rest(proxy: Product) -> Iterator[None]:
    """Afterwards nothing runs, waits or is reserved, and no session is left."""
    yield
    proxy.until(lambda: books(proxy) == (0, 0, 0))
    for session in proxy.get("/polykv/sessions")["sessions"]:
        proxy.http.delete(f"/polykv/sessions/{session['session_id']}")
    assert proxy.get("/polykv/pools/1/capacity")["n_pool_sessions"] == 0


def books(proxy: Product) -> tuple[int, int, int]:
    shown = proxy.get("/polykv/admission")
    return shown["n_running"], shown["n_queued"], proxy.get("/polykv/capacity")["n_requests"]


def policy(proxy: Product, **fields: object) -> None:
    proxy.http.delete("/polykv/pools/1/admission")
    reply = proxy.http.post("/polykv/pools/1/admission", json={**FLOOR, **fields})
    assert reply.status_code == 200, reply.text


def turn(proxy: Product, session: str, n: int = 4) -> httpx.Response:
    body = {"prompt": [*ROOT, 7], "n_predict": n, "pool_id": 1, "session_id": session, "ignore_eos": True}
    return proxy.http.post("/completion", json=body)


def until_measured(proxy: Product) -> None:
    """Until the effect of the last admission is known."""
    proxy.until(lambda: (now := capacity(proxy))["mean_active_tps"] is not None and not now["settling"])


def capacity(proxy: Product) -> dict[str, Any]:
    return proxy.get("/polykv/pools/1/capacity")


def test_a_session_that_runs_keeps_others_out_and_goes_on(proxy: Product) -> None:
    """The figure that refuses is the projection that capacity shows; the next turn of a known session is never refused."""
    policy(proxy)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(turn, proxy, "a", 1000)
        until_measured(proxy)
        shown = capacity(proxy)
        refused = turn(proxy, "b")
        assert first.result().status_code == 200
    error = refused.json()["error"]
    assert (refused.status_code, error["arm"], shown["arm"], shown["can_admit"]) == (429, "floor", "floor", False)
    assert 0 < error["value"] < shown["mean_active_tps"] < error["threshold"] == 1_000_000
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert turn(proxy, "a").status_code == 200


def test_a_queue_lets_in_the_guaranteed_ones_as_others_end(proxy: Product) -> None:
    """Eight agents, two of them guaranteed: all are served in the end, and never are there more than two."""
    policy(proxy, on_saturation="queue", guarantee_min_sessions=2, settle_max_ms=100, queue_timeout_ms=600_000)
    seen = []

    def agent(name: str) -> int:
        status = turn(proxy, name, 30).status_code
        seen.append(capacity(proxy)["n_pool_sessions"])
        proxy.http.delete(f"/polykv/sessions/{name}")
        return status

    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(agent, [f"agent-{n}" for n in range(8)]))
    assert (statuses, max(seen)) == ([200] * 8, 2)


def test_f020_whoever_leaves_gives_everything_back(proxy: Product) -> None:
    """Forty leave at any moment, in the queue and out of it; the book-keeping is checked afterwards."""
    policy(proxy, on_saturation="queue", guarantee_min_sessions=1, settle_max_ms=50)
    picks = random.Random(7)
    socks = []
    for n in range(40):
        body = b'{"prompt":%b,"n_predict":%d,"pool_id":1,"session_id":"s%d","stream":true}' % (
            str([*ROOT, n]).encode(),
            picks.choice((1, 50, 400)),
            n,
        )
        socks.append(proxy.ask_and_wait("/completion", body))
        if picks.random() < 0.7:
            leave(socks.pop(picks.randrange(len(socks))), reset=picks.random() < 0.5)
    for sock in socks:
        leave(sock, reset=True)


def test_the_queue_outlives_the_engine(proxy: Product) -> None:
    """It is killed while one runs and one waits: the first fails, the second is served by the next engine."""
    policy(proxy, on_saturation="queue", queue_timeout_ms=600_000)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(turn, proxy, "a", 7000)
        until_measured(proxy)
        second = threads.submit(turn, proxy, "b")
        proxy.until(lambda: books(proxy)[1] == 1)
        psutil.Process(proxy.get("/polykv/health")["pid"]).kill()
        with pytest.raises(httpx.HTTPError):
            first.result().raise_for_status()
        assert second.result().status_code == 200


def test_nothing_to_decide_is_nothing_added(proxy: Product) -> None:
    """Without policies a plain reply is the engine's, also after there were some."""
    policy(proxy)
    proxy.http.delete("/polykv/pools/1/admission")
    body = {"prompt": ROOT[:20], "n_predict": 2, "seed": 1, "temperature": 0}
    through, direct = proxy.http.post("/completion", json=body), proxy.engine.http.post("/completion", json=body)
    assert through.json()["content"] == direct.json()["content"]
    assert "opencoti" not in through.json()


def test_who_waits_when_the_proxy_is_stopped_is_told_at_once(engine_path: Path, tmp_path: Path) -> None:
    """Those who run have their time; those who wait have not begun."""
    with Served(engine_path, tiny_model("full"), tmp_path, args=["-c", "8192", "-np", "8", "-t", "1"]) as served:
        with httpx.Client(base_url=served.url, trust_env=False, timeout=HANG_GUARD_S) as http:
            http.post("/polykv/pools", json={"tokens": ROOT}).raise_for_status()
            http.post("/polykv/pools/1/admission", json={**FLOOR, "on_saturation": "queue"}).raise_for_status()
            body = {"prompt": [*ROOT, 7], "n_predict": 1500, "pool_id": 1, "ignore_eos": True}
            with ThreadPoolExecutor(5) as threads:
                first = threads.submit(http.post, "/completion", json={**body, "session_id": "a"})
                while not http.get("/polykv/pools/1/capacity").json()["n_pool_sessions"]:
                    pass
                others = [threads.submit(http.post, "/completion", json={**body, "session_id": f"b{n}"}) for n in range(4)]
                while http.get("/polykv/admission").json()["n_queued"] < 4:
                    pass
                served.process.terminate()
                codes = [(reply.result().status_code, reply.result().json()["error"]["code"]) for reply in others]
                assert codes == [(503, "draining")] * 4
                assert first.result().status_code == 200
        assert served.process.wait() == 0
