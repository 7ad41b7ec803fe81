"""Peers on the engine's device, through the proxy: routes, pages, metrics, events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from polykv_proxy.api.context import Keys
from polykv_proxy.gpu_share import layout
from tests.fakes.fake_engine import FakeEngine
from tests.integration.gpu_share.peers import new_key, segment
from tests.integration.metrics_rig import scraped
from tests.integration.rig import ManualClock, Rig, relayed, rig

NOW_US = int(ManualClock().wall() * 1e6)


def entry(slot: int, weight: float = 1.0, *, active: bool = True, heartbeat_us: int = NOW_US) -> layout.Entry:
    return layout.Entry(slot, 100 + slot, 5, 77, weight, active, heartbeat_us, 500_000, f"model-{slot}")


@pytest.fixture
def key() -> Iterator[str]:
    with new_key() as made:
        segment(made).write_bytes(layout.build((entry(0, 2.0), entry(1), entry(4, active=False))))
        yield made


@pytest.fixture
def engine(key: str) -> FakeEngine:
    """One that sits in slot 1."""
    made = FakeEngine()
    made.gpu_share = {"enabled": True, "gpu_key": key, "slot": 1, "weight": 1.0}
    return made


@pytest.fixture
async def proxy(tmp_path: Path, engine: FakeEngine) -> AsyncIterator[Rig]:
    async with rig(tmp_path, engine) as made:
        yield made


async def test_peers_are_shown_with_ours_apart(proxy: Rig, key: str) -> None:
    page = (await proxy.api.get("/gpu/peers")).json()
    ours = {"pid": 101, "name": "model-1", "slot": 1, "weight": 1.0, "share_pct": 33.333, "busy_pct": 50.0, "active": True}
    assert {name: page[name] for name in ("enabled", "why", "gpu_key")} == {"enabled": True, "why": None, "gpu_key": key}
    assert page["self"] == {**ours, "heartbeat_age_ms": 0}
    assert [(peer["slot"], peer["share_pct"]) for peer in page["peers"]] == [(0, 66.667), (4, 0.0)]


async def test_peers_are_seen_also_while_the_engine_is_away(proxy: Rig) -> None:
    await proxy.server.stop()
    await proxy.until_unlinked()
    assert len((await proxy.api.get("/gpu/peers")).json()["peers"]) == 2


async def test_props_say_the_same(proxy: Rig) -> None:
    async with relayed(proxy) as (_, client):
        proxy.server.pages["/props"] = (200, "application/json", b'{"total_slots": 4}')
        shown = (await client.get("/props")).json()["opencoti"]["gpu_share"]
    assert shown == (await proxy.api.get("/gpu/peers")).json()


async def test_a_weight_goes_to_the_engine(proxy: Rig, key: str) -> None:
    reply = await proxy.api.post("/gpu/weight", json={"weight": 2.5})
    assert (reply.status_code, reply.json()) == (200, {"weight": 2.5, "gpu_key": key, "slot": 1})
    assert proxy.engine.gpu_share["weight"] == 2.5
    assert (await proxy.api.post("/gpu/weight", json={"weight": 3})).json()["weight"] == 3.0


@pytest.mark.parametrize("body", [{"weight": 0}, {"weight": 1001}, {"weight": "2"}, {"weight": True}, {}, {"weight": 1, "x": 1}])
async def test_what_is_no_weight_is_refused_before_the_engine_is_asked(proxy: Rig, body: dict) -> None:
    reply = await proxy.api.post("/gpu/weight", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] in {"weight", "x"}
    assert proxy.engine.gpu_share["weight"] == 1.0


async def test_weights_want_the_admin_key_and_peers_the_key(tmp_path: Path, engine: FakeEngine) -> None:
    async with rig(tmp_path, engine, keys=Keys(frozenset({"user"}), "boss")) as proxy:
        user, boss = ({"authorization": f"Bearer {name}"} for name in ("user", "boss"))
        assert (await proxy.api.get("/gpu/peers")).status_code == 401
        assert (await proxy.api.get("/gpu/peers", headers=user)).status_code == 200
        assert (await proxy.api.post("/gpu/weight", json={"weight": 2}, headers=user)).status_code == 403
        assert (await proxy.api.post("/gpu/weight", json={"weight": 2}, headers=boss)).status_code == 200


async def test_an_engine_that_shares_nothing_is_501_with_the_reason(tmp_path: Path) -> None:
    async with rig(tmp_path) as proxy:
        reply = await proxy.api.post("/gpu/weight", json={"weight": 2})
        assert reply.status_code == 501
        assert reply.json()["error"]["code"] == "gpu_share_off"
        assert "a toy computes on no GPU" in reply.json()["error"]["message"]
        page = (await proxy.api.get("/gpu/peers")).json()
        assert page == {"enabled": False, "why": "a toy computes on no GPU", "gpu_key": None, "self": None, "peers": []}
        health = (await proxy.api.get("/polykv/health")).json()["gpu_share"]
        assert (health["enabled"], health["why"], health["n_peers"]) == (False, "a toy computes on no GPU", 0)


async def test_metrics_have_a_series_for_each_slot_and_none_for_who_has_gone(tmp_path: Path, engine: FakeEngine, key: str) -> None:
    async with scraped(tmp_path, engine) as metrics:
        found = await metrics.samples()
        assert (found["polykv_gpu_share_enabled"], found["polykv_gpu_peers"], found["polykv_gpu_slot"]) == (1, 3, 1)
        assert found['polykv_gpu_peer_weight{peer="0"}'] == 2
        assert found['polykv_gpu_peer_share_ratio{peer="1"}'] == pytest.approx(1 / 3, abs=1e-5)
        assert found['polykv_gpu_peer_active{peer="4"}'] == 0
        later = int(metrics.proxy.clock.wall() * 1e6)
        segment(key).write_bytes(layout.build((entry(1, heartbeat_us=later),)))
        found = await metrics.samples()
        assert found["polykv_gpu_peers"] == 1
        assert [name for name in found if name.startswith("polykv_gpu_peer_weight")] == ['polykv_gpu_peer_weight{peer="1"}']


async def test_who_comes_is_an_event(proxy: Rig, key: str) -> None:
    await proxy.runtime.sweep()
    segment(key).write_bytes(layout.build((entry(0, 2.0), entry(1), entry(4), entry(9, 0.5))))
    await proxy.runtime.sweep()
    events = proxy.runtime.hub.telemetry.news.after(proxy.runtime.hub.ledger.first_number - 1) or []
    assert [(event.type, event.facts["slot"], event.facts["weight"]) for event in events if event.topic == "peer"] == [
        ("joined", 9, 0.5)
    ]
