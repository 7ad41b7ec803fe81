"""Both clients against a whole proxy over a fake engine: every verb, typed results and errors, retries, event streams."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from opencoti_langgraph import (
    AsyncPoolClient,
    ContextExceededError,
    PoolApiError,
    PoolConflictError,
    PoolNotFoundError,
    PoolSaturatedError,
    PoolUnsupportedError,
    ProxyUnreachableError,
    SessionNotFoundError,
    calls,
)
from opencoti_langgraph.results import Pool, Progress
from tests.fakes.async_proxy import free_port
from tests.fakes.fake_engine import FakeEngine
from tests.integration.rig import Rig, relayed, rig
from tests.langgraph.verbs import Breaking, Fault, Verbs, closed, verbs_of

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "Where is the keel?"}
OF_A_POOL = (
    "pool", "release_pool", "pin_pool", "unpin_pool", "renew_pool", "evict_pool", "flush_pool", "verify_pool", "pool_tokens",
    "pool_text",
)  # fmt: skip
Connect = Callable[..., AbstractAsyncContextManager[tuple[Verbs, Breaking]]]


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, FakeEngine(max_pools=3)) as proxy:
        yield proxy


@pytest.fixture
async def connect(proxy: Rig, kind: str) -> AsyncIterator[Connect]:
    async with relayed(proxy) as (_, http):

        @asynccontextmanager
        async def connected(fault: Fault | None = None) -> AsyncIterator[tuple[Verbs, Breaking]]:
            verbs, transport = verbs_of(kind, str(http.base_url), fault)
            try:
                yield verbs, transport
            finally:
                await closed(verbs, transport)

        yield connected


@pytest.fixture
async def verbs(connect: Connect) -> AsyncIterator[Verbs]:
    async with connect() as (verbs, _):
        yield verbs


def every_call() -> list[calls.Call[object]]:
    one, text = [1], {"prompt": "x"}
    of_pools = [calls.fork_pool(1, **text), calls.compact_pool(1, **text), *(getattr(calls, verb)(*one) for verb in OF_A_POOL)]
    of_policies = [
        make(*at) for make in (calls.capacity, calls.admission, calls.set_admission, calls.clear_admission) for at in ([], one)
    ]
    whole = [calls.create_pool(**text), calls.pools(), calls.diff(1, 2), calls.match({}), calls.sessions(), calls.session("a")]
    told = [
        calls.end_session("a"),
        calls.decisions(),
        calls.tps_now(),
        calls.savings(),
        calls.health(),
        calls.Call("GET", "/polykv/events", dict),
    ]
    return [*of_pools, *of_policies, *whole, *told]


def test_the_clients_have_a_verb_for_every_route_of_the_proxy(tmp_path: Path) -> None:
    """Each route that docs/http-api.md heads can be called."""
    text = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    routes = re.findall(r"^### `(GET|POST|DELETE|PUT) (/polykv/[^`?]+)`", text, re.MULTILINE)
    assert len(routes) > 20
    known = {(call.method, call.path) for call in every_call()}
    others = {("DELETE", "/polykv/sessions/1"), ("GET", "/polykv/openapi.json")}  # by query instead, for any id; for tools
    for method, path in routes:
        shown = re.sub(r"\{id[^}]*\}", "1", path)
        if (method, shown) not in others:
            assert (method, shown.replace("sessions/1", "sessions/a")) in known, f"{method} {path} has no verb"


def test_a_client_alone_imports_no_langchain() -> None:
    """Both clients work where LangChain is not even loaded."""
    code = "import sys, opencoti_langgraph as o; o.PoolClient, o.AsyncPoolClient; print([m for m in sys.modules if 'langc' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_tree_is_made_looked_at_and_released(verbs: Verbs, proxy: Rig) -> None:
    """Create, fork, listing, tokens, text, diff, match, pin, renew, evict, flush and release, each with its typed result."""
    base = await verbs("create_pool", messages=[SYSTEM], name="base", ttl_s=60)
    task = await verbs("fork_pool", "base", messages=[SYSTEM, USER], name="task")
    assert (task.parent, task.branch_pos, task.residency) == (base.pool_id, base.prefix_len, "resident")
    assert [pool.name for pool in (await verbs("pools")).pools] == ["base", "task"]
    assert [pool.pool_id for pool in (await verbs("pool", "base")).subtree] == [task.pool_id]
    tokens = (await verbs("pool_tokens", "task")).tokens
    assert len(tokens) == task.prefix_len
    assert (await verbs("detokenize", tokens)) == (await verbs("pool_text", "task")).text
    assert (await verbs("diff", "base", "task")).common_len == base.prefix_len
    (prompt,) = (await verbs("match", {"messages": [SYSTEM, USER], "pool_id": "task"})).prompts
    assert prompt.attaches
    assert prompt.n_matched == task.prefix_len
    assert await verbs("count_tokens", {"messages": [SYSTEM, USER]}) == prompt.n_prompt
    assert (await verbs("pin_pool", "task", owner="me")).pinned
    assert not (await verbs("unpin_pool", "task", owner="me")).pinned
    assert (await verbs("renew_pool", "task", ttl_s=5.0)).ttl_s == 5
    assert (await verbs("evict_pool", "task")).evicted
    assert (await verbs("flush_pool", "base")).evicted == [base.pool_id]
    assert (await verbs("release_pool", "base", recursive=True)).released_pools == [task.pool_id, base.pool_id]


async def test_sessions_speeds_room_and_savings_are_typed(verbs: Verbs, proxy: Rig) -> None:
    """What telemetry there is comes back as results; a session is seen, and ends."""
    pool = await verbs("create_pool", messages=[SYSTEM])
    await proxy.call("/v1/chat/completions", {"messages": [SYSTEM, USER], "pool_id": pool.pool_id, "session_id": "a b/c"})
    await proxy.settle()
    assert (await verbs("session", "a b/c")).pool_id == pool.pool_id
    assert [s.session_id for s in (await verbs("sessions")).sessions] == ["a b/c"]
    assert (await verbs("capacity")).slots_total == 4
    assert (await verbs("tps_now")).sessions[0].session_id == "a b/c"
    assert (await verbs("savings")).n_tokens == pool.prefix_len
    assert (await verbs("health")).pools["state"] == "on"
    assert (await verbs("end_session", "a b/c")).ended


async def test_policies_and_decisions(verbs: Verbs, proxy: Rig) -> None:
    """A policy is set, holds, is seen in capacity, refuses with the arm, is inherited, and is taken away."""
    pool = await verbs("create_pool", messages=[SYSTEM])
    assert (await verbs("admission", pool.pool_id)).policy is None
    await verbs("set_admission", pool.pool_id, target_tps_per_session=5.0, mode="enforced", guarantee_min_sessions=0)
    found = (await verbs("admission", pool.pool_id)).policy
    assert (found.mode, found.target_tps_per_session, found.on_saturation) == ("enforced", 5.0, "reject")
    room = await verbs("capacity", pool.pool_id, expected_tokens=10)
    assert (room.can_admit, room.target_tps_per_session) == (True, 5.0)
    reply = await proxy.call("/v1/chat/completions", {"messages": [SYSTEM, USER], "pool_id": pool.pool_id})
    assert reply.status_code == 200
    child = await verbs("fork_pool", pool.pool_id, messages=[SYSTEM, USER])
    assert (await verbs("admission", child.pool_id)).inherited_from == pool.pool_id
    assert (await verbs("decisions", limit=5)).decisions[0]["pool_id"] == pool.pool_id
    assert (await verbs("clear_admission", pool.pool_id)).removed
    await verbs("set_admission", target_tps_per_session=3.0)
    assert (await verbs("admission")).policy.target_tps_per_session == 3
    assert (await verbs("capacity")).mode == "advisory"


async def test_tokens_come_from_the_model_s_own_tokenizer(verbs: Verbs, proxy: Rig) -> None:
    """`tokenize` adds the begin token only where it is asked for, so a suffix joins what a pool holds."""
    head, tail = await verbs("tokenize", "one two"), await verbs("tokenize", " three", add_special=False)
    assert head + tail == await verbs("tokenize", "one two three")
    assert await verbs("detokenize", tail) == " three"
    assert (await verbs("render", {"messages": [SYSTEM]})).startswith("<|system|>You are terse.")


async def test_every_error_is_of_its_class(verbs: Verbs, proxy: Rig) -> None:
    """Status and code decide the class; what the proxy counted is in the details."""
    base = await verbs("create_pool", messages=[SYSTEM], name="base")
    with pytest.raises(PoolNotFoundError, match="nowhere"):
        await verbs("pool", "nowhere")
    with pytest.raises(SessionNotFoundError):
        await verbs("session", "nobody")
    with pytest.raises(PoolConflictError) as taken:
        await verbs("create_pool", prompt="something else", name="base")
    assert taken.value.code == "name_taken"
    with pytest.raises(PoolConflictError) as differs:
        await verbs("fork_pool", "base", prompt="You are terse.", branch_pos=base.prefix_len)
    assert differs.value.details["first_differing_position"] >= 0
    with pytest.raises(ContextExceededError):
        await verbs("create_pool", tokens=list(range(16, 5000)))
    with pytest.raises(PoolApiError) as bad:
        await verbs("create_pool", prompt="x", messages=[SYSTEM])
    assert (bad.value.status, bad.value.param) == (400, "messages")


async def test_saturation_says_when_to_come_back(verbs: Verbs, proxy: Rig) -> None:
    """Three pools fit and are pinned; the fourth is PoolSaturatedError with `retry_after` and the counts."""
    for n in range(3):
        pool = await verbs("create_pool", tokens=[16 + n, 1, 2, 3])
        await verbs("pin_pool", pool.pool_id)
    with pytest.raises(PoolSaturatedError) as full:
        await verbs("create_pool", tokens=[99, 1, 2, 3])
    assert full.value.retry_after is not None
    assert full.value.details["seq_ids_used"] == 3


async def test_a_route_that_the_proxy_lacks_is_a_typed_error(verbs: Verbs, proxy: Rig) -> None:
    """An older proxy has not every verb: the error says so, instead of that a pool is missing."""
    with pytest.raises(PoolUnsupportedError, match="no such route"):
        await verbs("send", calls.Call("GET", "/polykv/not-yet", dict))


async def test_nobody_at_home_is_named_with_the_address(kind: str) -> None:
    """ProxyUnreachableError has the address."""
    port = free_port()
    verbs, transport = verbs_of(kind, f"http://127.0.0.1:{port}")
    with pytest.raises(ProxyUnreachableError, match=str(port)):
        await verbs("pools")
    assert len(transport.seen) == 3
    await closed(verbs, transport)


@pytest.mark.parametrize("verb", ["create_pool", "fork_pool"])
async def test_a_lost_answer_makes_no_second_pool(connect: Connect, proxy: Rig, verb: str) -> None:
    """Create and fork carry an idempotency key: when the answer is lost they are sent again, and it is the same pool."""
    await proxy.pool(messages=[SYSTEM], name="base")
    async with connect(lambda request, n: "after" if n == 1 else None) as (verbs, transport):
        parent = ["base"] if verb == "fork_pool" else []
        pool = await verbs(verb, *parent, messages=[SYSTEM, USER])
    keys = [request.headers["idempotency-key"] for request in transport.seen]
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert [p["pool_id"] for p in (await proxy.api.get("/polykv/pools")).json()["pools"]] == [1, pool.pool_id]


async def test_what_may_not_be_repeated_is_not(connect: Connect, proxy: Rig) -> None:
    """`compact` has no key: a lost answer is an error, after one request."""
    await proxy.pool(messages=[SYSTEM, USER], name="old")
    async with connect(lambda request, n: "after") as (verbs, transport):
        with pytest.raises(ProxyUnreachableError):
            await verbs("compact_pool", "old", messages=[SYSTEM])
    assert len(transport.seen) == 1


async def test_progress_ends_with_the_pool(verbs: Verbs, proxy: Rig) -> None:
    """Watching a pool being made gives progress with its id first, and the pool last."""
    items = [item async for item in verbs.stream("watch_create", messages=[SYSTEM], name="base")]
    assert isinstance(items[0], Progress)
    assert isinstance(items[-1], Pool)
    assert items[0].pool_id == items[-1].pool_id
    child = [item async for item in verbs.stream("watch_fork", "base", messages=[SYSTEM, USER])][-1]
    assert child.parent == items[-1].pool_id
    with pytest.raises(PoolConflictError):
        [item async for item in verbs.stream("watch_create", prompt="x", name="base")]


async def test_events_go_on_where_the_connection_broke(connect: Connect, proxy: Rig) -> None:
    """The stream breaks after each event; with `Last-Event-ID` every event comes once, in order."""
    async with connect(lambda request, n: "stream" if n <= 3 else None) as (verbs, transport):
        start = (await proxy.api.get("/polykv/pools")).json()["seq"]
        for n in range(3):
            await proxy.pool(tokens=[16 + n, 1, 2, 3], name=f"p{n}")
        seen = []
        async with asyncio.timeout(60):
            async for event in verbs.stream("events", topics=["pool"], last_event_id=str(start)):
                seen.append(event)
                if event.name == "p2" and event.type == "resident":
                    break
    assert [event.name for event in seen if event.type == "resident"] == ["p0", "p1", "p2"]
    assert len({event.seq for event in seen}) == len(seen)
    assert len(transport.seen) > 1
    assert transport.seen[1].headers["last-event-id"] in {str(event.seq) for event in seen}


async def test_a_watcher_that_comes_too_late_is_told(verbs: Verbs, proxy: Rig) -> None:
    """What is not kept any more is one event `resync`."""
    await proxy.pool(tokens=[16, 1, 2, 3])
    async with asyncio.timeout(60):
        async for event in verbs.stream("events", last_event_id="1"):
            assert event.topic == "resync"
            break


async def test_speeds_go_on_over_broken_connections(connect: Connect, proxy: Rig) -> None:
    """Each broken connection is opened again; readers see only speeds."""
    async with connect(lambda request, n: "stream" if n <= 2 else None) as (verbs, transport):
        n = 0
        async with asyncio.timeout(60):
            async for tps in verbs.stream("tps", interval_ms=100, running=True):
                assert tps.linked
                n += 1
                if n == 3:
                    break
    assert len(transport.seen) == 3


async def test_a_stream_from_nowhere_is_given_up(kind: str) -> None:
    """Where nobody ever answered, watching ends with ProxyUnreachableError."""
    verbs, transport = verbs_of(kind, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ProxyUnreachableError):
        [item async for item in verbs.stream("events")]
    await closed(verbs, transport)


async def test_compaction_by_refork_leaves_one_branch(verbs: Verbs, proxy: Rig) -> None:
    """The new pool hangs below the stable ancestor; the old one is gone; net cells went down."""
    base = await verbs("create_pool", messages=[SYSTEM], name="base")
    old = await verbs("fork_pool", "base", messages=[SYSTEM, USER, {"role": "assistant", "content": "long " * 50}])
    new = await verbs("compact_by_refork", old.pool_id, messages=[SYSTEM, {"role": "user", "content": "in short"}])
    assert new.pool.parent == base.pool_id
    assert new.released == (old.pool_id,)
    assert {pool.pool_id for pool in (await verbs("pools")).pools} == {base.pool_id, new.pool.pool_id}


async def test_compaction_again_after_a_crash(verbs: Verbs, proxy: Rig) -> None:
    """With a name and an ancestor the second time finds what the first one made, whether the old pool is gone or not."""
    base = await verbs("create_pool", messages=[SYSTEM], name="base")
    old = await verbs("fork_pool", "base", messages=[SYSTEM, USER])
    short = {"messages": [SYSTEM, {"role": "user", "content": "in short"}], "name": "short", "ancestor": base.pool_id}
    ids = [(await verbs("compact_by_refork", old.pool_id, release=release, **short)) for release in (False, True, True)]
    assert len({one.pool.pool_id for one in ids}) == 1
    assert [(one.old_id, one.released) for one in ids] == [(old.pool_id, ()), (old.pool_id, (old.pool_id,)), (None, ())]
    assert (await verbs("compact_by_refork", "short", **short)).released == ()
    with pytest.raises(PoolNotFoundError):
        await verbs("compact_by_refork", old.pool_id, messages=[SYSTEM])
    assert {pool.pool_id for pool in (await verbs("pools")).pools} == {base.pool_id, ids[0].pool.pool_id}


async def test_compaction_from_tokens_and_of_a_root(verbs: Verbs, proxy: Rig) -> None:
    """`compacted_tokens` is the full prefix; a root's successor is a root."""
    old = await verbs("create_pool", tokens=[1, 20, 21, 22, 23])
    new = await verbs("compact_by_refork", old.pool_id, compacted_tokens=[1, 20, 99])
    assert new.pool.parent is None
    assert (await verbs("pool_tokens", new.pool.pool_id)).tokens == [1, 20, 99]


async def test_an_old_branch_in_use_goes_by_its_lease(verbs: Verbs, proxy: Rig) -> None:
    """Where a session still holds the old pool, compaction does not fail: the old pool has a time to live."""
    await verbs("create_pool", messages=[SYSTEM], name="base")
    old = await verbs("fork_pool", "base", messages=[SYSTEM, USER])
    await proxy.call("/v1/chat/completions", {"messages": [SYSTEM, USER], "pool_id": old.pool_id, "session_id": "busy"})
    await proxy.settle()
    new = await verbs("compact_by_refork", old.pool_id, messages=[SYSTEM, {"role": "user", "content": "short"}], grace_s=7.0)
    assert new.released == ()
    assert (await verbs("pool", old.pool_id)).ttl_s == 7


def test_one_async_client_serves_one_loop_after_another() -> None:
    """Connections belong to a loop: a second `asyncio.run` opens its own instead of failing on a closed loop."""
    replies = httpx.MockTransport(lambda request: httpx.Response(200, json={"pools": []}))
    client = AsyncPoolClient(transport=lambda: replies)
    assert [asyncio.run(client.pools()).pools for _ in range(3)] == [[], [], []]
