"""kill -9 of engine and proxy at random moments: announced pools are there, their prefix is shared again, nothing leaks.

`POLYKV_KILL_ROUNDS` sets the number of rounds (default 8).
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fakes.proxy_process import Served
from tests.models import tiny_model

pytestmark = pytest.mark.engine

ROUNDS = int(os.environ.get("POLYKV_KILL_ROUNDS", "8"))
HANG_GUARD_S = 120
MOST_POOLS = 8


class World:
    """A proxy that is killed and started again, and what its clients were told."""

    def __init__(self, engine: Path, folder: Path) -> None:
        self.engine, self.folder, self.rng = engine, folder, random.Random(11)
        self.known: dict[str, int] = {}
        self.unsure: set[str] = set()
        self.ids: dict[int, str] = {}
        self.n_names = 0
        self.start()

    def start(self) -> None:
        self.served = Served(self.engine, tiny_model("full"), self.folder, args=("-c", "4096", "-np", "2", "-t", "1"))
        self.client = httpx.Client(base_url=self.served.url, trust_env=False, timeout=60)

    def prefix(self, name: str) -> list[int]:
        return [100 + int(name[1:]), *range(200, 260)]

    def create(self) -> None:
        name = f"p{self.n_names}"
        self.n_names += 1
        self.unsure.add(name)
        reply = self.client.post("/polykv/pools", json={"tokens": self.prefix(name), "name": name})
        if reply.status_code == 201:
            self.known[name] = reply.json()["pool_id"]
        self.unsure.discard(name)

    def delete(self) -> None:
        name = self.rng.choice(sorted(self.known))
        pool_id = self.known.pop(name)
        self.unsure.add(name)
        if self.client.delete(f"/polykv/pools/{pool_id}").status_code in {200, 202, 404}:
            self.unsure.discard(name)
        else:
            self.known[name] = pool_id
            self.unsure.discard(name)

    def attach(self) -> None:
        name = self.rng.choice(sorted(self.known))
        body = {"prompt": [*self.prefix(name), self.rng.randrange(300, 900)], "n_predict": 8, "pool_id": name}
        self.client.post("/completion", json=body)

    def act(self) -> None:
        for _ in range(4):
            what = self.rng.choice(["create", "create", "attach", "delete"])
            try:
                if what == "create" and len(self.known) < MOST_POOLS:
                    self.create()
                elif what == "attach" and self.known:
                    self.attach()
                elif what == "delete" and self.known:
                    self.delete()
            except httpx.HTTPError:
                pass

    def kill(self, *, proxy: bool) -> None:
        before = self.client.get("/polykv/health").json()
        engine = psutil.Process(int(str(before["pid"])))
        acting = threading.Thread(target=self.act)
        acting.start()
        time.sleep(self.rng.random() * 0.15)
        if proxy:
            self.served.process.kill()
            self.served.process.wait()
            self.served.process.stderr.close()  # type: ignore[union-attr]
        else:
            engine.kill()
        acting.join()
        if proxy:
            engine.wait(HANG_GUARD_S)
            self.client.close()
            self.start()
        self.until(lambda: self.back(before["pools"]["boot_id"]))

    def back(self, boot_id: str) -> bool:
        health = self.client.get("/polykv/health").json()
        return health["state"] == "ready" and health["pools"]["state"] == "on" and health["pools"]["boot_id"] != boot_id

    def until(self, holds: object) -> None:
        end = time.monotonic() + HANG_GUARD_S
        while not holds():  # type: ignore[operator]
            assert time.monotonic() < end
            time.sleep(0.02)

    def check(self) -> None:
        listed = {pool["name"]: pool for pool in self.client.get("/polykv/pools").json()["pools"]}
        assert set(self.known) <= set(listed) <= set(self.known) | self.unsure
        for name, pool in listed.items():
            assert self.ids.setdefault(pool["pool_id"], name) == name, "an id was used twice"
            assert pool["prefix_len"] == len(self.prefix(name))
            self.known[name] = pool["pool_id"]
        self.unsure.clear()
        if self.known:
            name = self.rng.choice(sorted(self.known))
            body = {"prompt": [*self.prefix(name), 7], "n_predict": 1, "pool_id": name}
            reply = self.client.post("/completion", json=body)
            assert (reply.status_code, reply.headers["x-cached-prefix-tokens"]) == (200, str(len(self.prefix(name))))
        self.until(self.balanced)

    def balanced(self) -> bool:
        pools = self.client.get("/polykv/pools").json()["pools"]
        capacity = self.client.get("/polykv/capacity").json()
        resident = sum(pool["residency"] == "resident" for pool in pools)
        return capacity["n_requests"] == 0 and capacity["seq_ids_used"] == resident


@pytest.mark.timeout(300 + 10 * ROUNDS)
def test_nothing_is_lost_and_nothing_leaks(engine_path: Path, tmp_path: Path) -> None:
    """After every kill announced pools are there under their ids, and the engine holds no sequence of nobody."""
    world = World(engine_path, tmp_path)
    for number in range(ROUNDS):
        world.kill(proxy=number % 4 == 3)
        world.check()
    for name in list(world.known):
        assert world.client.delete(f"/polykv/pools/{name}").status_code in {200, 202}
    world.until(lambda: world.client.get("/polykv/capacity").json()["seq_ids_used"] == 0)
    world.client.close()
    assert world.served.stop() == 0
