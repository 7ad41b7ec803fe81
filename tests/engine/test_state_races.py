"""`state` and `events` read at full speed by several readers while the engine works, sleeps and wakes.

Law: a reader judges what it read by itself, at once. Under ThreadSanitizer (`scripts/e2e sanitizers`) the same test looks for races
between the engine's threads.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import HANG_GUARD_S, Engine
from tests.models import tiny_model

pytestmark = pytest.mark.engine

ARGS = ("-c", 4096, "-np", 3, "-t", 1, "-kvu", "-b", 64, "-ub", 64, "--sleep-idle-seconds", 1)
ORDER = ("launched", "first_token", "finished", "released")
POOL = list(range(300, 420))
LAST_REQ = 999_999


class StateReader:
    """Reads `state`, and holds each one against the one before."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.last: dict[str, Any] = {"boot_id": "", "update": 0, "slots": []}
        self.seqs: dict[str, str] = {}  # seq.gen -> boot

    def step(self) -> None:
        state = self.engine.state()
        assert state["update"] >= self.last["update"]
        assert state["cells"]["used"] <= state["cells"]["total"]
        seqs = [entry["seq"] for entry in state["seqs"]]
        assert len({seq.split(".")[0] for seq in seqs}) == len(seqs), "an id is given twice"
        for seq in seqs:
            assert self.seqs.setdefault(seq, state["boot_id"]) == state["boot_id"], "a sequence outlived its boot"
        if state["phase"] == "sleeping":
            assert (seqs, state["slots"], state["cells"]["used"]) == ([], [], 0)
        for slot in state["slots"]:
            assert 0 <= slot["n_shared"] <= slot["n_tokens"] <= slot["n_ctx"]
            assert (slot["seq"] is not None) <= (slot["n_shared"] > 0)
        if state["boot_id"] == self.last["boot_id"]:
            for old, new in zip(self.last["slots"], state["slots"], strict=False):
                assert all(new["totals"][name] >= value for name, value in old["totals"].items()), (old, new)
        self.last = state


class EventReader:
    """Reads `events` up to the last request; one that hops leaves again and again, and goes on from the id it saw last."""

    def __init__(self, engine: Engine, done: threading.Event, hops: bool) -> None:
        self.engine, self.done, self.hops = engine, done, hops
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.ids: list[str] = []
        self.rng = random.Random(3)

    def step(self) -> None:
        headers = {"Last-Event-ID": self.ids[-1]} if self.ids else None
        n_left = self.rng.randrange(1, 6) if self.hops else -1
        with self.engine.lines("GET", "/_polykv/v1/events", headers=headers) as lines:
            fields: dict[str, str] = {}
            for line in lines:
                if line and not line.startswith(":"):
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif fields:
                    n_left -= self.take(fields)
                    fields = {}
                if n_left == 0 or self.over():
                    return

    def take(self, fields: dict[str, str]) -> bool:
        if fields["event"] == "counters":  # have no id, and may come after the last event
            return False
        self.ids.append(fields.get("id", self.ids[-1] if self.ids else ""))
        self.seen.append((fields["event"], json.loads(fields["data"])))
        return fields["event"] != "hello"

    def over(self) -> bool:
        return self.done.is_set() or (bool(self.seen) and self.seen[-1][0] == "released" and self.seen[-1][1]["req"] == LAST_REQ)

    def of_slots(self) -> list[tuple[str, dict[str, Any]]]:
        return [(name, data) for name, data in self.seen if name not in {"hello", "resync"}]


def check_events(events: list[tuple[str, dict[str, Any]]]) -> None:
    """Each request's events come in order, and end once."""
    by_task: dict[int, list[str]] = defaultdict(list)
    for name, data in events:
        by_task[data["task"]].append(name)
    for names in by_task.values():
        ends = Counter(names)
        assert (ends["dropped"] + ends["released"], ends["launched"]) == (1, ends["released"]), names
        places = [ORDER.index(name) for name in names if name != "dropped"]
        assert all(a < b for a, b in pairwise(places)), names


def play(engine: Engine, session: int) -> None:
    """One round of everything: prefill, attach, decode, snapshot, free, cancel, end sessions."""
    seq = engine.materialise(POOL)
    assert seq in [entry["seq"] for entry in engine.state()["seqs"]], "reply seen: state shows it"
    with ThreadPoolExecutor(3) as threads:
        prompt = [*POOL, session % 1000 + 500]
        jobs = [threads.submit(engine.attached, prompt, seq, 60, session + i, ignore_eos=True, n_probs=0) for i in range(2)]
        while sum(slot["state"] == "generating" for slot in engine.state()["slots"]) < 2 and not all(job.done() for job in jobs):
            pass
        made = engine.snapshot(session)
        if "seq" in made:
            assert engine.state()["update"] >= made["update"]
            threads.submit(engine.free, made["seq"])
        freed = engine.free(seq)
        assert freed["freed"] is True
        state = engine.state()
        assert state["update"] >= freed["update"]
        assert seq not in [entry["seq"] for entry in state["seqs"]]
        engine.end_session(session + 1)
        with engine.lines("POST", "/_polykv/v1/seqs", {"tokens": list(range(300, 2300))}) as lines:
            next(lines)  # and leave: it is cancelled
        assert {job.result().status for job in jobs} <= {200, 400}
    engine.end_session(session)


def test_readers_at_full_speed_see_whole_states_and_every_event(engine_path: Path) -> None:
    """Updates never go back, totals only grow, nothing outlives its boot, and each request's events are whole and in order."""
    done, numbers, boots = threading.Event(), count(1, 10), set()
    with Engine(engine_path, tiny_model("full"), ARGS) as engine, ThreadPoolExecutor(5) as threads:
        states = [StateReader(engine) for _ in range(3)]
        events = [EventReader(engine, done, hops) for hops in (False, True)]
        try:
            looking = [threads.submit(repeat, reader.step, done.is_set) for reader in states]
            following = [threads.submit(repeat, reader.step, reader.over) for reader in events]
            while not all(reader.seen for reader in events):
                check_alive(looking + following)
            for _ in range(2):
                boots.add(engine.hello()["boot_id"])
                play(engine, next(numbers))
                while engine.state()["phase"] != "sleeping":
                    check_alive(looking + following)
                gone = engine.end_session(next(numbers))
                assert (gone["cancelled"], gone["cells_freed"], engine.state()["phase"]) == (0, 0, "sleeping")
                engine.completion([1, 2, 3], 2)  # wakes it up
            engine.completion([1, 2, 3], 2, {"x-polykv-req": str(LAST_REQ)})
            for job in following:
                job.result(HANG_GUARD_S)
            check_alive(looking)
        finally:
            done.set()
    assert len(boots) == 2
    check_events(events[0].of_slots())
    assert all(event in events[0].seen for event in events[1].of_slots())


def repeat(step: Callable[[], None], over: Callable[[], bool]) -> None:
    while not over():
        step()


def check_alive(jobs: list[Future[None]]) -> None:
    for job in jobs:
        if job.done():
            job.result()
            raise AssertionError("a reader ended")
