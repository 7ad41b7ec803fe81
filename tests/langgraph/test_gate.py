"""The capacity gate: how many may start, fan-out by headroom, waiting, interrupting, raising, and the channels it writes."""

from __future__ import annotations

import asyncio
import itertools
import operator
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from opencoti_langgraph import (
    GateClosedError,
    Patience,
    PoolAdmissionLimiter,
    PoolState,
    add_capacity_gate,
    aresume_when_free,
    latest,
    newest,
    report_of_reply,
    resume_when_free,
    route_on_headroom,
    startable,
)
from opencoti_langgraph.results import Capacity
from tests.langgraph.reports import FREE, FULL, Clock, Room

SETTLING = {**FULL, "reason": "measurement settling", "arm": "settling", "settling": True, "settle_remaining_ms": 1200}


class State(PoolState, total=False):
    """Tasks, and what is done of them."""

    tasks: list[str]
    done: Annotated[list[str], operator.add]
    waves: Annotated[list[int], operator.add]


def left(state: State) -> list[str]:
    return [task for task in state["tasks"] if task not in state.get("done", [])]


def graph(room: Room, *, saver: bool = False, **options: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("worker", lambda sent: {"done": [sent["task"]], "capacity": {"seq": 99, "headroom_sessions": 1}})
    add_capacity_gate(builder, room.client, todo=left, **options)
    builder.add_edge(START, "gate")
    return builder.compile(checkpointer=InMemorySaver() if saver else None)


def waves(compiled: Any, tasks: str, config: Any = None) -> list[int]:
    """How many workers each step had."""
    steps = compiled.stream({"tasks": list(tasks)}, config, stream_mode="debug")
    started = [event["step"] for event in steps if event["type"] == "task" and event["payload"]["name"] == "worker"]
    return [len(list(same)) for _, same in itertools.groupby(started)]


TABLE = [
    ({"slots_total": 4, "slots_busy": 1}, 3),
    ({"slots_total": 4, "slots_busy": 6}, 0),
    ({"slots_free": 2, "slots_total": 4, "slots_busy": 0}, 2),
    (FREE, 4),
    (FULL, 0),
    (SETTLING, 0),
    ({**FREE, "settling": True}, 0),
    ({**FREE, "n_warming": 1, "target_tps_per_session": 5.0}, 0),
    ({**FREE, "n_warming": 1}, 4),
    ({**FREE, "guaranteed": True, "headroom_sessions": 0, "n_warming": 3, "target_tps_per_session": 5.0}, 1),
    ({**FULL, "arm": "context", "reason": "context headroom exhausted"}, 0),
    ({"can_admit": True}, 1),
]


@pytest.mark.parametrize(("report", "n"), TABLE)
def test_how_many_may_start(report: dict[str, Any], n: int) -> None:
    """Slots without admission, headroom with it; nothing while settling, warming under a floor, or refused by any arm."""
    assert startable(Capacity(**report)) == n


def test_workers_start_in_waves_by_headroom() -> None:
    """Each wave is as large as the report before it allows, and none larger."""
    room = Room({**FREE, "headroom_sessions": 2}, {**FREE, "headroom_sessions": 1}, {**FREE, "headroom_sessions": 9})
    assert waves(graph(room), "abcde") == [2, 1, 2]


def test_a_gate_may_have_a_bound_of_its_own() -> None:
    """`fan_out` is never exceeded, whatever the headroom."""
    assert waves(graph(Room(FREE), fan_out=3), "abcde") == [3, 2]


def test_it_writes_what_it_saw() -> None:
    """`capacity_ok`, headroom and mean speed are in the state; of the reports the one with the larger `seq` stays."""
    final = graph(Room(FREE)).invoke({"tasks": ["a"]})
    assert (final["capacity_ok"], final["headroom_sessions"], final["mean_active_tps"]) == (True, 4, 9.5)
    assert final["capacity"]["seq"] == 99
    assert final["done"] == ["a"]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_waiting_asks_again_as_told(way: str) -> None:
    """It waits as long as the report says, not longer than its bound, and starts when there is room."""
    clock = Clock()
    patience = Patience(60, sleep=clock.sleep, asleep=clock.asleep, clock=clock)
    compiled = graph(Room(SETTLING, {**FULL, "expected_wait_ms": 3000}, FREE), patience=patience)
    final = compiled.invoke({"tasks": ["a"]}) if way == "sync" else asyncio.run(compiled.ainvoke({"tasks": ["a"]}))
    assert final["done"] == ["a"]
    assert clock.slept == [1.2, 3.0]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_waiting_has_an_end(way: str) -> None:
    """GateClosedError with the last report, at the bound."""
    clock = Clock()
    patience = Patience(10, sleep=clock.sleep, asleep=clock.asleep, clock=clock)
    compiled = graph(Room(FULL), patience=patience)
    with pytest.raises(GateClosedError, match="below floor") as closed:
        compiled.invoke({"tasks": ["a"]}) if way == "sync" else asyncio.run(compiled.ainvoke({"tasks": ["a"]}))
    assert clock.now == pytest.approx(10)
    assert closed.value.capacity["arm"] == "floor"


def test_an_engine_that_is_away_has_no_room_for_now() -> None:
    """503 is waited for like saturation."""
    clock = Clock()
    compiled = graph(Room(503, 503, FREE), patience=Patience(60, sleep=clock.sleep, clock=clock))
    assert compiled.invoke({"tasks": ["a"]})["done"] == ["a"]
    assert len(clock.slept) == 2


def test_raising_starts_nothing() -> None:
    """`mode="raise"`: no worker, GateClosedError."""
    with pytest.raises(GateClosedError):
        graph(Room(FULL), mode="raise").invoke({"tasks": ["a"]})


def test_an_interrupt_says_why_and_looks_again_on_resume() -> None:
    """Full, resumed while still full, then room: one interrupt at a time, and every task is done once."""
    compiled = graph(Room(FULL, FULL, {**FREE, "headroom_sessions": 2}), saver=True, mode="interrupt")
    config = {"configurable": {"thread_id": "t"}}
    compiled.invoke({"tasks": list("abc")}, config)
    (waiting,) = compiled.get_state(config).interrupts
    assert waiting.value["type"] == "pool_saturated"
    assert waiting.value["retry_after"] > 0
    assert resume_when_free(compiled, config, Room(FREE).client)["done"] == ["a", "b", "c"]
    assert compiled.get_state(config).next == ()


def test_driving_a_durable_graph_watches_before_it_resumes() -> None:
    """`resume_when_free` resumes only when there is room, async as well."""
    watched = Room(FULL, FULL, FREE)
    compiled = graph(Room(FULL, FREE), saver=True, mode="interrupt")
    config = {"configurable": {"thread_id": "t"}}
    compiled.invoke({"tasks": list("ab")}, config)
    clock = Clock()
    patience = Patience(60, sleep=clock.sleep, asleep=clock.asleep, clock=clock)
    assert asyncio.run(aresume_when_free(compiled, config, watched.client, patience=patience))["done"] == ["a", "b"]
    assert len(watched.asked) == 3
    assert len(clock.slept) == 2
    assert resume_when_free(compiled, config, watched.client) is None


def test_watching_has_an_end() -> None:
    """No room in time is GateClosedError, and the graph still waits where it was."""
    compiled = graph(Room(FULL), saver=True, mode="interrupt")
    config = {"configurable": {"thread_id": "t"}}
    compiled.invoke({"tasks": ["a"]}, config)
    clock = Clock()
    with pytest.raises(GateClosedError):
        resume_when_free(compiled, config, Room(FULL).client, patience=Patience(60, sleep=clock.sleep, clock=clock))
    assert compiled.get_state(config).interrupts


def test_the_pool_s_own_report_counts() -> None:
    """By the state's `pool_id` or the gate's own, with what each session will need; without such a report the whole's."""
    room = Room(404, FREE)
    graph(room, expected_tokens=500).invoke({"tasks": ["a"], "pool_id": "agents"})
    assert room.asked[:2] == ["/polykv/pools/agents/capacity?expected_tokens=500", "/polykv/capacity?expected_tokens=500"]
    room = Room(FREE)
    graph(room, pool="mine").invoke({"tasks": ["a"], "pool_id": "agents"})
    assert room.asked[0] == "/polykv/pools/mine/capacity"


def test_the_edges_are_drawn() -> None:
    """The gate's ways are known before it runs."""
    drawn = {(edge.source, edge.target) for edge in graph(Room(FREE)).get_graph().edges}
    assert {("gate", "worker"), ("gate", "gate"), ("worker", "gate"), ("gate", END)} <= drawn


def test_an_unknown_mode_is_refused() -> None:
    """At once, by name."""
    with pytest.raises(ValueError, match="later"):
        graph(Room(FREE), mode="later")


reports = st.fixed_dictionaries({"headroom_sessions": st.integers(0, 9)}, optional={"seq": st.integers(0, 99)})


@given(st.lists(reports, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_the_newest_report_stays_whatever_the_order(many: list[dict[str, Any]], random: Any) -> None:
    """The reducer's outcome has the largest `seq`, in any order of writing."""
    shuffled = random.sample(many, len(many))
    found: dict[str, Any] = {}
    for report in shuffled:
        found = newest(found, report)
    assert found.get("seq", -1) == max(report.get("seq", -1) for report in many)
    assert newest(None, None) == {}


def test_parallel_writers_do_not_collide() -> None:
    """Two workers of one step may both write every channel of PoolState."""

    class Both(PoolState, total=False):
        pass

    builder = StateGraph(Both)
    for n in (1, 2):
        facts = {"pool_id": n, "capacity": {"seq": n}, "capacity_ok": True, "headroom_sessions": n, "mean_active_tps": 1.0}
        builder.add_node(f"w{n}", lambda state, facts=facts: facts)
        builder.add_edge(START, f"w{n}")
    final = builder.compile().invoke({})
    assert final["capacity"] == {"seq": 2}
    assert latest(1, 2) == 2


def test_conditional_edges_follow_the_headroom() -> None:
    """`route_on_headroom` reads the newest report, else the flat channel."""
    route = route_on_headroom(2)
    assert route({"capacity": {"headroom_sessions": 2}}) == "spawn"
    assert route({"capacity": {"headroom_sessions": 2, "settling": True}}) == "hold"
    assert route({"headroom_sessions": 1}) == "hold"
    assert route_on_headroom(enough="go", below="stay")({}) == "stay"


def test_a_worker_reports_what_its_reply_said() -> None:
    """Headroom out of `response_metadata`; nothing where the server said nothing."""
    told = {"headroom": {"sessions": 3, "ctx_tokens": 9}, "opencoti": {"mean_active_tps": 7.0}}
    assert report_of_reply(AIMessage("x", response_metadata=told)) == {"headroom_sessions": 3, "mean_active_tps": 7.0}
    assert report_of_reply(AIMessage("x")) == {}


def test_the_rate_limiter_waits_for_room() -> None:
    """Any chat model with it calls only when the proxy has room; without blocking it says no."""
    clock = Clock()
    patience = Patience(60, sleep=clock.sleep, asleep=clock.asleep, clock=clock)
    room = Room(FULL, FREE)
    model = FakeListChatModel(responses=["hi"], rate_limiter=PoolAdmissionLimiter(room.client, patience=patience))
    assert model.invoke("x").text == "hi"
    assert len(room.asked) == 2
    assert not PoolAdmissionLimiter(Room(FULL).client).acquire(blocking=False)
    assert asyncio.run(PoolAdmissionLimiter(Room(FREE).client, patience=patience).aacquire())
    assert not asyncio.run(PoolAdmissionLimiter(Room(FULL).client).aacquire(blocking=False))
