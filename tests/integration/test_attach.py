"""Requests that name pools, in every way and with every mistake, through the gate."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import Rig, rig

SYSTEM = "You are a careful agent with many tools and a long memory"
ASK = {"prompt": SYSTEM + " and a question", "n_predict": 2}


async def pool_and(proxy: Rig, body: dict | bytes, headers: dict[str, str] | None = None) -> tuple[int, str | None]:
    """Tokens shared and the pool's id as the reply shows them."""
    reply = await proxy.call("/completion", body, headers)
    assert reply.status_code == 200, reply.text
    return int(reply.headers.get("x-cached-prefix-tokens", -1)), reply.headers.get("x-pool-id")


WAYS = [
    ({"pool_id": 1}, {}),
    ({"pool_id": "1"}, {}),
    ({"pool_id": "agents"}, {}),
    ({}, {"X-Pool-Id": "1"}),
    ({}, {"x-pool-id": "agents"}),
    ({"pool_id": 1}, {"x-pool-id": "1"}),
    ({"model": "any-model@agents"}, {}),
    ({"model": "any@model@1"}, {}),
    ({"shared_pool_slot": 1, "shared_prefix_n_tokens": 5}, {}),
    ({"shared_pool_slot": 1}, {}),
]


@pytest.mark.parametrize(("fields", "headers"), WAYS, ids=[str(way) for way in WAYS])
async def test_every_way_to_name_a_pool_attaches(tmp_path: Path, fields: dict, headers: dict) -> None:
    """By id, digits or name; in body, header or model; an explicit P bounds what is shared."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt=SYSTEM, name="agents")
        expected = fields.get("shared_prefix_n_tokens", pool["prefix_len"])
        assert await pool_and(proxy, {**ASK, **fields}, headers) == (expected, "1")


async def test_the_body_reaches_the_engine_as_it_came(tmp_path: Path) -> None:
    """Unknown fields, odd spacing, duplicate keys and number formats survive; the last duplicate decides."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        raw = b'{"pool_id" : 99,  "x":1.50e+3, "prompt":' + json.dumps(ASK["prompt"]).encode() + b', "n_predict":2,"pool_id":1 }'
        assert (await pool_and(proxy, raw))[1] == "1"
        assert proxy.server.seen_bodies[-1] == raw


@pytest.mark.parametrize("key", ['"pool\\u005fid"', '"\\u0070ool_id"'])
async def test_an_escaped_key_is_the_key(tmp_path: Path, key: str) -> None:
    """JSON may spell the key with escapes; the engine reads it so, and we do."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        raw = f'{{{key}:1,"prompt":{json.dumps(ASK["prompt"])},"n_predict":1}}'.encode()
        assert (await pool_and(proxy, raw))[1] == "1"


@pytest.mark.parametrize(
    "body",
    [
        {**ASK, "model": "x@nobody"},
        {**ASK, "model": "mail@example.com"},
        {**ASK, "note": '"pool_id": 1'},
        b'{not json "pool_id": 1',
    ],
)
async def test_what_only_looks_like_a_pool_is_a_plain_request(tmp_path: Path, body: dict | bytes) -> None:
    """Unknown model suffixes, our words inside text, and bodies that are no JSON go to the engine untouched."""
    async with rig(tmp_path) as proxy:
        reply = await proxy.call("/completion", body)
        assert "x-pool-id" not in reply.headers
        assert "opencoti" not in reply.text
        assert reply.status_code == (200 if isinstance(body, dict) else 400)
        assert len(proxy.runtime.hub.ledger.books) == 0


async def test_the_default_pool_applies_to_requests_that_name_none(tmp_path: Path) -> None:
    """Before the pool exists nothing happens; then every request shares it; a named pool still wins."""
    async with rig(tmp_path, default_pool="agents") as proxy:
        assert (await pool_and(proxy, ASK))[1] is None
        await proxy.pool(prompt=SYSTEM, name="agents")
        await proxy.pool(prompt="You", name="other")
        assert (await pool_and(proxy, {**ASK, "prompt": SYSTEM + " x y"}))[1] == "1"
        assert (await pool_and(proxy, {**ASK, "pool_id": "other"}))[1] == "2"


REFUSED = [
    ({"pool_id": 9}, {}, 404, "pool_id"),
    ({"pool_id": "nobody"}, {}, 404, "pool_id"),
    ({}, {"x-pool-id": "9"}, 404, "x-pool-id"),
    ({"pool_id": 1.5}, {}, 400, "pool_id"),
    ({"pool_id": True}, {}, 400, "pool_id"),
    ({"pool_id": -1}, {}, 400, "pool_id"),
    ({"pool_id": "No Name"}, {}, 400, "pool_id"),
    ({"pool_id": {}}, {}, 400, "pool_id"),
    ({"pool_id": 1}, {"x-pool-id": "2"}, 400, "pool_id"),
    ({"pool_id": 1, "shared_pool_slot": 2}, {}, 400, "shared_pool_slot"),
    ({"pool_id": 1, "id_slot": 0}, {}, 400, "id_slot"),
    ({"pool_id": 1, "shared_prefix_n_tokens": -1}, {}, 400, "shared_prefix_n_tokens"),
    ({"pool_id": 1, "shared_prefix_n_tokens": "5"}, {}, 400, "shared_prefix_n_tokens"),
    ({"shared_prefix_n_tokens": 5}, {}, 400, "shared_prefix_n_tokens"),
    ({"session_id": ""}, {}, 400, "session_id"),
    ({"session_id": 5}, {}, 400, "session_id"),
    ({"session_id": "ä"}, {}, 400, "session_id"),
    ({"session_id": "a"}, {"x-session-id": "b"}, 400, "session_id"),
    ({}, {"x-session-id": "x" * 129}, 400, "x-session-id"),
]


@pytest.mark.parametrize(("fields", "headers", "status", "param"), REFUSED, ids=[str(case[:2]) for case in REFUSED])
async def test_a_wrong_wish_is_refused_by_name(tmp_path: Path, fields: dict, headers: dict, status: int, param: str) -> None:
    """Nothing reaches the engine, no book stays open, and the answer names the field."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM, name="agents")
        n_calls = len(proxy.server.calls)
        reply = await proxy.call("/completion", {**ASK, **fields}, headers)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
        assert len(proxy.server.calls) == n_calls
        assert len(proxy.runtime.hub.ledger.books) == 0


async def test_conflicting_names_are_both_shown(tmp_path: Path) -> None:
    """A body and a header that name different pools: the message has both."""
    async with rig(tmp_path) as proxy:
        reply = await proxy.call("/completion", {**ASK, "pool_id": "one"}, {"x-pool-id": "two"})
        assert "'one'" in reply.json()["error"]["message"]
        assert "'two'" in reply.json()["error"]["message"]


async def test_an_explicit_p_that_does_not_hold_is_409_with_the_position(tmp_path: Path) -> None:
    """The first position at which prompt and pool differ is in the answer; a P that holds is served."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt="one two three four", name="p")
        body = {"prompt": "one two five", "n_predict": 1, "pool_id": 1}
        reply = await proxy.call("/completion", {**body, "shared_prefix_n_tokens": pool["prefix_len"]})
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "prefix_mismatch")
        assert reply.json()["error"]["first_differing_position"] == 3
        assert len(proxy.runtime.hub.ledger.books) == 0
        assert await pool_and(proxy, {**body, "shared_prefix_n_tokens": 2}) == (2, "1")


async def test_an_unknown_legacy_pool_is_served_with_the_reason(tmp_path: Path) -> None:
    """`shared_pool_slot` of an unknown pool costs nothing but the sharing, and the reply says why."""
    async with rig(tmp_path) as proxy:
        reply = await proxy.call("/completion", {**ASK, "shared_pool_slot": 7, "shared_prefix_n_tokens": 5})
        assert (reply.status_code, reply.headers["x-cached-prefix-tokens"]) == (200, "0")
        assert reply.json()["opencoti"]["miss"] == "stale_seq"


async def test_a_prompt_that_does_not_match_shares_nothing_and_says_so(tmp_path: Path) -> None:
    """Zero is sent as zero, with the engine's reason, and the pool's hit count does not move."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(tokens=[20, 21, 22])
        reply = await proxy.call("/completion", {"prompt": [30, 31, 32], "n_predict": 1, "pool_id": 1})
        assert (reply.headers["x-cached-prefix-tokens"], reply.json()["opencoti"]["miss"]) == ("0", "token_mismatch")
        await proxy.settle()
        shown = (await proxy.api.get("/polykv/pools/1")).json()
        assert (shown["n_queries"], shown["n_hits"]) == (1, 0)


async def test_several_prompts_and_copies_close_their_book_together(tmp_path: Path) -> None:
    """Prompt arrays attach each by itself; the book is closed when all of them are released."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt=SYSTEM)
        body = {"prompt": [SYSTEM + " a", SYSTEM + " b", "else"], "n_predict": 1, "pool_id": 1}
        reply = await proxy.call("/completion", body)
        assert [one["opencoti"]["cached_prefix_tokens"] for one in reply.json()] == [pool["prefix_len"]] * 2 + [1]
        await proxy.settle()
        assert len(proxy.runtime.hub.ledger.books) == 0
        assert (await proxy.api.get("/polykv/pools/1")).json()["n_queries"] == 3


async def test_a_lost_pool_is_rebuilt_once_for_all_who_wait(tmp_path: Path) -> None:
    """Many requests for a lost pool share one materialisation, and all of them share the prefix."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt=SYSTEM)
        await proxy.engine.sleep_and_wake()
        await proxy.until_linked(proxy.engine.boot_id)
        assert (await proxy.api.get("/polykv/pools/1")).json()["residency"] == "lost"
        made = proxy.engine.n_seqs_made
        calls = [pool_and(proxy, {**ASK, "prompt": f"{SYSTEM} and {n}", "pool_id": 1}) for n in range(4)]
        assert await asyncio.gather(*calls) == [(pool["prefix_len"], "1")] * 4
        assert proxy.engine.n_seqs_made == made + 1


@pytest.mark.parametrize(
    ("fault", "miss"),
    [
        (EngineFaultError(429, "no_seq_ids", "start with a larger --polykv-max-pools"), "no_seq_ids"),
        (EngineFaultError(500, "server_error", "broken"), "rebuild_failed"),
        (EngineFaultError(422, "too_long", "the cache is full"), "rebuild_failed"),
    ],
)
async def test_a_rebuild_that_fails_never_fails_the_request(
    tmp_path: Path, fault: EngineFaultError, miss: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is served in full, zero shared, with the reason, in our words; the next one tries again."""
    async with rig(tmp_path) as proxy:
        pool = await proxy.pool(prompt=SYSTEM)
        await proxy.engine.sleep_and_wake()
        await proxy.until_linked(proxy.engine.boot_id)
        proxy.engine.fail_next("seqs", fault)
        reply = await proxy.call("/completion", {**ASK, "pool_id": 1})
        assert (reply.status_code, reply.headers["x-cached-prefix-tokens"]) == (200, "0")
        assert reply.json()["opencoti"]["miss"] == miss
        proxy.engine.fail_next("seqs", fault)
        assert (await proxy.call("/completion", {**ASK, "pool_id": 1})).json()["opencoti"]["miss"] == miss
        told = [line for line in caplog.messages if "pool 1" in line]
        assert len(told) == 1
        assert told[0].startswith("pool 1: served without it: ")
        assert "--polykv" not in told[0]
        assert (await pool_and(proxy, {**ASK, "prompt": SYSTEM + " once more", "pool_id": 1}))[0] in {pool["prefix_len"], 0}
        assert (await proxy.api.get("/polykv/pools/1")).json()["residency"] == "resident"


async def test_the_last_waiter_that_leaves_stops_a_rebuild(tmp_path: Path) -> None:
    """Waiters come and go; when nobody waits any more the work stops, and nothing is left behind in engine or books."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        await proxy.engine.sleep_and_wake()
        await proxy.until_linked(proxy.engine.boot_id)
        proxy.engine.hold()
        calls = [asyncio.ensure_future(proxy.call("/completion", {**ASK, "pool_id": 1})) for _ in range(2)]
        while proxy.runtime.pools.flight(1) is None:
            await asyncio.sleep(0)
        flight = proxy.runtime.pools.flight(1)
        assert flight is not None
        calls[0].cancel()
        await asyncio.wait([calls[0]])
        assert not flight.done
        calls[1].cancel()
        await asyncio.wait([calls[1]])
        await flight.ended()
        proxy.engine.go()
        assert len(proxy.runtime.hub.ledger.books) == 0
        assert (await proxy.api.get("/polykv/pools/1")).json()["residency"] == "lost"
        assert (await pool_and(proxy, {**ASK, "pool_id": 1}))[0] > 0


async def test_a_request_that_waits_is_served_when_its_pool_is_released(tmp_path: Path) -> None:
    """DELETE stops a rebuild; those who waited are served unshared, and the pool is gone."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        await proxy.engine.sleep_and_wake()
        await proxy.until_linked(proxy.engine.boot_id)
        proxy.engine.hold()
        call = asyncio.ensure_future(proxy.call("/completion", {**ASK, "pool_id": 1}))
        while proxy.runtime.pools.flight(1) is None:
            await asyncio.sleep(0)
        reply = await proxy.api.delete("/polykv/pools/1")
        assert (reply.status_code, reply.json()["n_running"]) == (202, 1)
        proxy.engine.go()
        served = await call
        assert (served.status_code, served.headers["x-cached-prefix-tokens"]) == (200, "0")
        await proxy.settle()
        assert (await proxy.api.get("/polykv/pools/1")).status_code == 404


async def test_an_attached_request_never_computes_more_than_the_twin(tmp_path: Path) -> None:
    """Where the slot already holds more than the pool, the pool is left alone, and the reply says so."""
    async with rig(tmp_path, FakeEngine(n_slots=1)) as proxy:
        await proxy.pool(prompt="You are")
        await proxy.call("/completion", {**ASK, "session_id": "s"})
        before = proxy.engine.computed
        reply = await proxy.call("/completion", {"prompt": SYSTEM + " and a question w0 w1 more", "pool_id": 1, "session_id": "s"})
        assert proxy.engine.computed - before == 1
        assert (reply.headers["x-cached-prefix-tokens"], reply.json()["opencoti"]["miss"]) == ("0", "own_cache_longer")


async def test_a_refusal_of_the_engine_closes_the_book(tmp_path: Path) -> None:
    """An error answer of the engine reaches the client, and no reference to the pool stays."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        proxy.engine.fail_next("complete", EngineFaultError(500, "server_error", "broken"))
        reply = await proxy.call("/completion", {**ASK, "pool_id": 1})
        assert reply.status_code == 500
        await proxy.settle()
        assert (await proxy.api.delete("/polykv/pools/1")).json()["released"] is True
