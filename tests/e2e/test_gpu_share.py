"""Two whole products on one device: the real engines find each other, and both proxies show it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.fakes.product import Product, product
from tests.integration.gpu_share.peers import new_key
from tests.models import tiny_model

pytestmark = pytest.mark.engine

ARGS = ("-c", 4096, "-np", 2, "-kvu")


@pytest.fixture
def pair(engine_path: Path, tmp_path: Path) -> Iterator[tuple[Product, Product]]:
    """Weights two and one."""
    with ExitStack() as stack:
        key = stack.enter_context(new_key())
        made = []
        for name, weight in (("first", "2"), ("second", "1")):
            options = ("--gpu-share-key", key, "--gpu-share-weight", weight)
            folder = tmp_path / name
            folder.mkdir()
            made.append(stack.enter_context(product(engine_path, tiny_model("one-layer"), folder, *options, args=ARGS)))
        yield made[0], made[1]


def shares(proxy: Product) -> tuple[float | None, list[float]]:
    page = proxy.get("/gpu/peers")
    return page["self"] and page["self"]["share_pct"], [peer["share_pct"] for peer in page["peers"]]


def test_both_show_each_other_and_weights_take_effect_for_both(pair: tuple[Product, Product]) -> None:
    """Each sees itself and the other; a weight that one is given is what the other is told of."""
    first, second = pair
    assert (shares(first), shares(second)) == ((66.667, [33.333]), (33.333, [66.667]))
    assert first.get("/gpu/peers")["peers"][0]["pid"] == second.served.health["pid"]
    assert second.http.post("/gpu/weight", json={"weight": 6}).json()["weight"] == 6.0
    assert (shares(first), shares(second)) == ((25.0, [75.0]), (75.0, [25.0]))
    assert first.get("/props")["opencoti"]["gpu_share"]["peers"][0]["weight"] == 6.0


def test_a_peer_that_computes_has_all_of_it_while_the_other_is_idle(pair: tuple[Product, Product]) -> None:
    """Idle peers have no share; the one that works has it all, and says so in its metrics."""
    first, second = pair
    first.ask([1, 2, 3], 64)
    assert (shares(first), shares(second)) == ((100.0, [0.0]), (0.0, [100.0]))
    page = first.http.get("/metrics").text
    assert 'polykv_gpu_peer_share_ratio{peer="0"} 1.0' in page
    assert "polykv_gpu_peers 2.0" in page


def test_peers_are_seen_while_the_own_engine_is_restarted(pair: tuple[Product, Product]) -> None:
    """Killed, it is gone for all; the other stays on the page meanwhile, and the new engine takes a place of its own."""
    first, second = pair
    killed = first.served.health["pid"]
    psutil.Process(killed).send_signal(signal.SIGKILL)
    first.until(lambda: (page := first.get("/gpu/peers"))["self"] is not None and page["self"]["pid"] != killed)
    second.until(lambda: shares(second) == (33.333, [66.667]))
    assert second.get("/gpu/peers")["peers"][0]["pid"] == first.get("/gpu/peers")["self"]["pid"]
