"""`POST /polykv/pools`: every source, name, wait mode and refusal, over the fake engine."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from polykv_proxy.api.app import build_app
from polykv_proxy.api.context import ApiContext
from polykv_proxy.core.boots import Boots
from polykv_proxy.core.ledger import LedgerLimits
from polykv_proxy.core.quarantine import Quarantine
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_records import EngineFaultError
from tests.integration.rig import listening, rig, served

SYSTEM = "You are a careful agent with many tools and a long memory"
TURNS = [{"role": "system", "content": SYSTEM}]


async def test_a_prompt_and_its_tokens_make_the_same_pool(tmp_path: Path) -> None:
    """A pool from text has the tokens that the completion route would prefill, one begin token included."""
    async with rig(tmp_path) as proxy:
        by_text = await proxy.pool(prompt=SYSTEM)
        by_ids = await proxy.pool(tokens=proxy.engine.tokenizer.encode(SYSTEM))
        assert by_text["prefix_hash"] == by_ids["prefix_hash"]
        assert (by_text["source"], by_ids["source"]) == ("prompt", "tokens")


@pytest.mark.parametrize(
    "head",
    [
        [{"role": "system", "content": SYSTEM}],
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello there"}],
        [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
    ],
)
async def test_a_pool_from_messages_is_a_prefix_of_every_continuation(tmp_path: Path, head: list[dict]) -> None:
    """Whatever turn follows, the request shares the whole pool: the dummies' own text is not in it."""
    async with rig(tmp_path) as proxy:
        tools = [{"type": "function", "function": {"name": "look"}}]
        pool = await proxy.pool(messages=head, tools=tools)
        role = "assistant" if head[-1]["role"] == "user" else "user"
        for text in ("A question", "7 more", "Zebra"):
            body = {"messages": [*head, {"role": role, "content": text}], "tools": tools, "pool_id": pool["pool_id"]}
            reply = await proxy.call("/v1/chat/completions", body)
            assert reply.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])
        shown = proxy.engine.tokenizer.decode(proxy.engine.seqs[4].tokens)
        assert shown.endswith(f"<|{role}|>")


async def test_a_template_without_a_stable_start_is_named(tmp_path: Path) -> None:
    """When no token is common to all continuations beyond the begin token's place, the answer is 422 about the template."""
    async with rig(tmp_path) as proxy:
        proxy.engine.tokenizer.encode = lambda text, bos=True: [ord(char) for char in text]  # type: ignore[assignment]
        body = {"messages": TURNS, "chat_template_kwargs": {"date_first": True}}
        reply = await proxy.api.post("/polykv/pools", json=body)
        assert reply.status_code == 422
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("template_not_splittable", "messages")
        assert "template" in error["message"]


async def test_a_session_becomes_a_pool_without_computing_anything(tmp_path: Path) -> None:
    """`from_session` snapshots what the session's slot holds; its tokens come back with it."""
    async with rig(tmp_path) as proxy:
        await proxy.call("/completion", {"prompt": SYSTEM, "n_predict": 3, "session_id": "main"})
        await proxy.settle()
        before = proxy.engine.computed
        pool = await proxy.pool(from_session="main", name="snap")
        assert pool["prefix_len"] == len(proxy.engine.tokenizer.encode(SYSTEM)) + 3
        assert proxy.engine.computed == before
        part = await proxy.pool(from_session="main", n_tokens=5)
        assert part["prefix_len"] == 5
        again = await proxy.api.post("/polykv/pools", json={"from_session": "main", "name": "snap"})
        assert (again.status_code, again.json()["pool_id"]) == (200, pool["pool_id"])
        assert len(proxy.engine.seqs) == 2


async def test_a_session_that_is_not_there_cannot_become_a_pool(tmp_path: Path) -> None:
    """An unknown session is 404, one whose KV is gone 409."""
    async with rig(tmp_path) as proxy:
        unknown = await proxy.api.post("/polykv/pools", json={"from_session": "nobody"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")
        await proxy.call("/completion", {"prompt": "hi", "session_id": "s"})
        await proxy.settle()
        for slot in proxy.engine.slots:
            slot.clear()
        gone = await proxy.api.post("/polykv/pools", json={"from_session": "s"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (409, "session_not_resident")
        assert (await proxy.api.get("/polykv/pools")).json()["pools"] == []


async def test_a_name_stands_for_one_prefix(tmp_path: Path) -> None:
    """The same name and prefix answer 200 with the pool there is; another prefix is a 409."""
    async with rig(tmp_path) as proxy:
        first = await proxy.pool(prompt=SYSTEM, name="agents")
        same = await proxy.api.post("/polykv/pools", json={"prompt": SYSTEM, "name": "agents"})
        assert (same.status_code, same.json()["pool_id"]) == (200, first["pool_id"])
        other = await proxy.api.post("/polykv/pools", json={"prompt": SYSTEM + " else", "name": "agents"})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "name_taken")
        assert proxy.engine.n_seqs_made == 1


async def test_two_at_once_with_one_name_make_one_pool(tmp_path: Path) -> None:
    """Creates of the same name and prefix at the same time share the work."""
    async with rig(tmp_path) as proxy:
        body = {"prompt": SYSTEM, "name": "agents"}
        replies = await asyncio.gather(*[proxy.api.post("/polykv/pools", json=body) for _ in range(4)])
        assert {reply.json()["pool_id"] for reply in replies} == {1}
        assert sorted(reply.status_code for reply in replies) == [200, 200, 200, 201]
        assert proxy.engine.n_seqs_made == 1


async def test_an_idempotency_key_repeats_its_answer(tmp_path: Path) -> None:
    """The same key and body answer alike without work, at once and later; another body is 409; after a day the key is free."""
    async with rig(tmp_path) as proxy:
        headers = {"idempotency-key": "k1"}
        raw = json.dumps({"prompt": SYSTEM})
        replies = await asyncio.gather(*[proxy.api.post("/polykv/pools", content=raw, headers=headers) for _ in range(3)])
        later = await proxy.api.post("/polykv/pools", content=raw, headers=headers)
        assert {reply.text for reply in [*replies, later]} == {replies[0].text}
        assert {reply.status_code for reply in [*replies, later]} == {201}
        assert later.headers["idempotent-replayed"] == "true"
        other = await proxy.api.post("/polykv/pools", json={"prompt": "else"}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_mismatch")
        proxy.clock.now += 24 * 3600
        assert (await proxy.api.post("/polykv/pools", json={"prompt": "else"}, headers=headers)).json()["pool_id"] == 2


async def test_wait_0_answers_at_once_and_the_pool_follows(tmp_path: Path) -> None:
    """202 with a Location while the pool is materializing; requests that name it wait for it."""
    async with rig(tmp_path) as proxy:
        proxy.engine.hold()
        reply = await proxy.api.post("/polykv/pools?wait=0", json={"prompt": SYSTEM})
        assert (reply.status_code, reply.headers["location"]) == (202, "/polykv/pools/1")
        assert reply.json()["residency"] == "materializing"
        call = asyncio.ensure_future(proxy.call("/completion", {"prompt": SYSTEM + " more", "pool_id": 1}))
        await asyncio.sleep(0)
        assert not call.done()
        proxy.engine.go()
        assert (await call).headers["x-cached-prefix-tokens"] == str(reply.json()["prefix_len"])
        assert (await proxy.api.get("/polykv/pools/1")).json()["residency"] == "resident"


async def test_a_pool_that_was_promised_and_failed_says_so(tmp_path: Path) -> None:
    """After a 202 a failure stays to be read, and the name can be used again; without a 202 nothing stays."""
    async with rig(tmp_path) as proxy:
        proxy.engine.fail_next("prefill", EngineFaultError(500, "server_error", "it broke"))
        proxy.engine.hold()
        await proxy.api.post("/polykv/pools?wait=0", json={"prompt": SYSTEM, "name": "p"})
        flight = proxy.runtime.pools.flight(1)
        assert flight is not None
        proxy.engine.go()
        await flight.ended()
        failed = (await proxy.api.get("/polykv/pools/p")).json()
        assert failed["residency"] == "failed"
        assert "it broke" in failed["reason"]
        assert (await proxy.pool(prompt=SYSTEM, name="p"))["pool_id"] == 2
        proxy.engine.fail_next("prefill", EngineFaultError(500, "server_error", "it broke"))
        assert (await proxy.api.post("/polykv/pools", json={"prompt": "x y z"})).status_code == 502
        assert [pool["pool_id"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]] == [2]


async def test_a_pool_that_failed_its_checks_gives_its_name_away(tmp_path: Path) -> None:
    """The next create of that name makes a new pool, and the old one is gone from the journal too."""
    async with served(FakeEngine(), tmp_path) as server:
        async with rig(tmp_path, server=server, state_dir=tmp_path / "state") as proxy:
            await proxy.pool(prompt=SYSTEM, name="p")
            condemned = Quarantine(proxy.runtime.hub.ledger).give_up(1, "it failed a check twice")
            await proxy.runtime.hub.run(condemned.commands)
            assert (await proxy.pool(prompt=SYSTEM, name="p"))["pool_id"] == 2
        async with rig(tmp_path, server=server, state_dir=tmp_path / "state") as proxy:
            assert [pool["pool_id"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]] == [2]


async def test_stream_1_shows_progress_and_ends_with_done(tmp_path: Path) -> None:
    """Server-sent events: `progress` with counts, then one `done` with the pool; errors known at once are plain answers."""
    async with rig(tmp_path) as proxy:
        reply = await proxy.api.post("/polykv/pools?stream=1", json={"tokens": list(range(16, 316))})
        events = [dict(line.split(": ", 1) for line in block.splitlines()) for block in reply.text.strip().split("\n\n")]
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert [event["event"] for event in events][-1] == "done"
        assert all(event["event"] == "progress" for event in events[:-1])
        assert json.loads(events[-1]["data"])["residency"] == "resident"
        assert json.loads(events[-2]["data"])["total"] == 300
        bad = await proxy.api.post("/polykv/pools?stream=1", json={"tokens": [999_999]})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "tokens[0]")


@pytest.mark.parametrize("mode", ["?wait=1", "?stream=1"])
@pytest.mark.parametrize(("extra", "kept"), [({}, False), ({"name": "p"}, True)])
async def test_a_client_that_leaves_cancels_a_pool_nobody_can_name(tmp_path: Path, mode: str, extra: dict, kept: bool) -> None:
    """Leaving cancels the work and leaves nothing, unless the pool has a name to be found by."""
    async with rig(tmp_path) as proxy, listening(proxy.app, tmp_path / "public.sock") as transport:
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            proxy.engine.hold()
            call = asyncio.ensure_future(client.post(f"/polykv/pools{mode}", json={"prompt": SYSTEM, **extra}))
            async with asyncio.timeout(20):
                while proxy.runtime.pools.flight(1) is None:
                    await asyncio.sleep(0.005)
            flight = proxy.runtime.pools.flight(1)
            assert flight is not None
            call.cancel()
            await asyncio.wait([call])
        if kept:
            proxy.engine.go()
        async with asyncio.timeout(20):
            await flight.ended()
        proxy.engine.go()
        pools = (await proxy.api.get("/polykv/pools")).json()["pools"]
        assert [pool["name"] for pool in pools] == (["p"] if kept else [])
        async with asyncio.timeout(20):
            while len(proxy.engine.seqs) != len(pools):
                await proxy.runtime.sweep()
                await proxy.runtime.hub.settle()


BAD = [
    ({}, "tokens"),
    ({"tokens": [1], "prompt": "x"}, "prompt"),
    ({"tokens": []}, "tokens"),
    ({"tokens": [1, "2"]}, "tokens[1]"),
    ({"tokens": [1, True]}, "tokens[1]"),
    ({"tokens": [1, -5]}, "tokens[1]"),
    ({"tokens": [1, 99_999]}, "tokens[1]"),
    ({"tokens": [1, 2**40]}, "tokens[1]"),
    ({"tokens": [1.5]}, "tokens[0]"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"messages": []}, "messages"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages"),
    ({"prompt": "x", "tools": []}, "tools"),
    ({"prompt": "x", "n_tokens": 3}, "n_tokens"),
    ({"from_session": "s", "n_tokens": 0}, "n_tokens"),
    ({"from_session": ""}, "from_session"),
    ({"prompt": "x", "name": "7"}, "name"),
    ({"prompt": "x", "name": "Upper"}, "name"),
    ({"prompt": "x", "name": "a" * 65}, "name"),
    ({"prompt": "x", "ttl_s": 0}, "ttl_s"),
    ({"prompt": "x", "ttl_s": "1"}, "ttl_s"),
    ({"prompt": "x", "pool": 1}, "pool"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[json.dumps(body)[:40] for body, _ in BAD])
async def test_a_bad_field_is_named(tmp_path: Path, body: dict, param: str) -> None:
    """400 with the field's name, and nothing was made."""
    async with rig(tmp_path) as proxy:
        reply = await proxy.api.post("/polykv/pools", json=body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert (error["param"], error["code"], error["type"]) == (param, "invalid_request", "invalid_request_error")
        assert len(proxy.runtime.hub.ledger.tree) == 0


async def test_bodies_that_are_no_object_and_flags_that_are_no_flag_are_refused(tmp_path: Path) -> None:
    """Not JSON, not an object, and unknown flag values are 400; a body over the limit is 413."""
    async with rig(tmp_path) as proxy:
        for raw in (b"", b"{", b"[1]", b"\xff"):
            assert (await proxy.api.post("/polykv/pools", content=raw)).status_code == 400
        assert (await proxy.api.post("/polykv/pools?wait=maybe", json={"prompt": "x"})).json()["error"]["param"] == "wait"
        assert (await proxy.api.post("/polykv/pools", json={"prompt": "x"}, headers={"idempotency-key": " "})).status_code == 400
        small = httpx.ASGITransport(build_app(ApiContext(proxy.runtime, body_limit=20)))
        async with httpx.AsyncClient(transport=small, base_url="http://proxy") as client:
            long = await client.post("/polykv/pools", json={"prompt": "x" * 20})
            assert (long.status_code, long.json()["error"]["code"]) == (413, "body_too_large")


async def test_ids_of_pools_that_are_not_there_yet_are_taken_too(tmp_path: Path) -> None:
    """The engine has none left although nothing is resident: the counts are its own, and the message says where they are."""
    async with rig(tmp_path, FakeEngine(max_pools=3)) as proxy:
        proxy.engine.fail_next("seqs", EngineFaultError(429, "no_seq_ids", "full"))
        error = (await proxy.api.post("/polykv/pools", json={"prompt": "one"})).json()["error"]
        assert (error["code"], error["seq_ids_used"], error["seq_ids_max"]) == ("pool_seqs_exhausted", 3, 3)
        assert "0 of 3 pools are resident (the others are being made or given up)" in error["message"]


async def test_what_can_never_fit_is_422_and_what_is_full_is_429(tmp_path: Path) -> None:
    """A prefix as long as a slot is 422; no sequence id left is 429 with the counts; too many pool objects likewise."""
    async with rig(tmp_path, FakeEngine(max_pools=1, n_ctx=200), limits=LedgerLimits(max_pool_objects=2)) as proxy:
        long = await proxy.api.post("/polykv/pools", json={"tokens": list(range(16, 216))})
        assert (long.status_code, long.json()["error"]["code"]) == (422, "cannot_fit")
        await proxy.pool(prompt="one")
        await proxy.api.post("/polykv/pools/1/pin")
        full = await proxy.api.post("/polykv/pools", json={"prompt": "two"})
        error = full.json()["error"]
        assert (full.status_code, error["code"], error["seq_ids_used"], error["seq_ids_max"]) == (429, "pool_seqs_exhausted", 1, 1)
        assert "retry-after" in full.headers
        Boots(proxy.runtime.hub.ledger).lost("test")
        proxy.engine.seqs.clear()
        await proxy.pool(prompt="three")
        many = await proxy.api.post("/polykv/pools", json={"prompt": "four"})
        assert (many.status_code, many.json()["error"]["code"]) == (429, "too_many_pools")


async def test_an_engine_that_cannot_share_says_why(tmp_path: Path) -> None:
    """501 with the engine's own reason when its memory class cannot share prefixes."""
    async with rig(tmp_path) as proxy:
        proxy.runtime.hub.hello = proxy.runtime.hub.hello.model_copy(update={"prefix_sharing": "none"})  # type: ignore[union-attr]
        reply = await proxy.api.post("/polykv/pools", json={"prompt": "x"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (501, "pools_unsupported")
        assert "a toy" in reply.json()["error"]["message"]
