"""Pools through the whole proxy on the real engine: every source, sharing as the engine counts it, sessions, release."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.fakes.proxy_process import Served

pytestmark = pytest.mark.engine

SYSTEM = "You are a terse assistant who knows a great deal about ships, harbours and the open sea."
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    engine, model = request.getfixturevalue("engine_path"), request.getfixturevalue("smollm2")
    served = Served(engine, model, tmp_path_factory.mktemp("pools"))
    with httpx.Client(base_url=served.url, trust_env=False, timeout=120) as client:
        yield client
    assert served.stop() == 0


@pytest.fixture
def made(client: httpx.Client) -> Iterator[list[int]]:
    """Ids of pools that the test made; released afterwards, with all sessions."""
    ids: list[int] = []
    yield ids
    for pool_id in ids:
        client.delete(f"/polykv/pools/{pool_id}")
    for session in client.get("/polykv/sessions").json()["sessions"]:
        if session["session_id"]:
            client.delete(f"/polykv/sessions/{session['session_id']}")


def create(client: httpx.Client, made: list[int], **body: object) -> dict:
    reply = client.post("/polykv/pools", json=body)
    assert reply.status_code == 201, reply.text
    made.append(reply.json()["pool_id"])
    return reply.json()


def chat(*turns: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"]
    return [{"role": "system", "content": SYSTEM}] + [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]


def test_f017_every_source_is_a_true_prefix_of_the_chat(client: httpx.Client, made: list[int]) -> None:
    """Pools from messages, from the rendered text and from its ids are true prefixes of a chat with that system prompt."""
    ask = {"messages": chat("Where is the keel?"), "max_tokens": 1, "cache_prompt": True}
    by_messages = create(client, made, messages=chat())
    text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    by_text = create(client, made, prompt=text)
    ids = client.post("/tokenize", json={"content": text, "add_special": True, "parse_special": True}).json()["tokens"]
    by_ids = create(client, made, tokens=ids)
    assert by_messages["prefix_hash"] == by_text["prefix_hash"] == by_ids["prefix_hash"]
    for pool in (by_messages, by_text, by_ids):
        reply = client.post(CHAT, json={**ask, "pool_id": pool["pool_id"], "session_id": f"of-{pool['pool_id']}"})
        assert reply.headers["x-cached-prefix-tokens"] == str(pool["prefix_len"])


@pytest.mark.parametrize("cut", ["a terse assist", "harbours and the op", "ships, har"])
def test_f017_a_prefix_that_ends_inside_a_word_is_cut_back(client: httpx.Client, made: list[int], cut: str) -> None:
    """Where tokens merge over the pool's end, what is shared ends at the last stable token and is never zero."""
    text = SYSTEM[: SYSTEM.index(cut) + len(cut)]
    pool = create(client, made, prompt=text)
    body = {"prompt": SYSTEM, "n_predict": 1, "pool_id": pool["pool_id"], "session_id": f"cut-{pool['pool_id']}"}
    shared = int(client.post("/completion", json=body).headers["x-cached-prefix-tokens"])
    assert pool["prefix_len"] - 3 <= shared <= pool["prefix_len"]
    explicit = client.post("/completion", json={**body, "shared_prefix_n_tokens": pool["prefix_len"] + 1})
    assert explicit.status_code == 409
    assert explicit.json()["error"]["first_differing_position"] == shared


def test_f017_a_prefix_that_ends_inside_an_emoji_is_cut_back(client: httpx.Client, made: list[int]) -> None:
    """A pool that ends between the bytes of one character shares up to the byte before which tokens differ."""
    whole = client.post("/tokenize", json={"content": "We sail \U0001f6a2 today", "add_special": True}).json()["tokens"]
    other = client.post("/tokenize", json={"content": "We sail \U0001f6a3 today", "add_special": True}).json()["tokens"]
    same = next(n for n, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
    pool = create(client, made, tokens=whole[: same + 1])
    reply = client.post("/completion", json={"prompt": "We sail \U0001f6a3 today", "n_predict": 1, "pool_id": pool["pool_id"]})
    assert reply.headers["x-cached-prefix-tokens"] == str(same)


def test_fan_out_uses_the_prefix_once(client: httpx.Client, made: list[int]) -> None:
    """Sessions on one pool compute only their own part, and the cells in use are the pool's plus theirs."""
    before = client.get("/polykv/capacity").json()["cells_used"]
    pool = create(client, made, messages=chat(), name="fleet")
    for n in range(3):
        body = {"messages": chat(f"Question {n}?"), "max_tokens": 4, "pool_id": "fleet", "session_id": f"agent-{n}"}
        reply = client.post(CHAT, json=body)
        assert reply.json()["opencoti"]["cached_prefix_tokens"] == pool["prefix_len"]
        assert reply.json()["timings"]["prompt_n"] == reply.json()["usage"]["prompt_tokens"] - pool["prefix_len"]
    while (now := client.get("/polykv/capacity").json())["slots_busy"] or now["n_requests"]:
        pass
    shown = client.get("/polykv/pools/fleet").json()
    own = sum(session["suffix_n_tokens"] for session in shown["sessions"])
    assert len(shown["sessions"]) == 3
    assert client.get("/polykv/capacity").json()["cells_used"] - before <= pool["prefix_len"] + own


def test_a_conversation_becomes_a_pool_for_others(client: httpx.Client, made: list[int]) -> None:
    """`from_session` computes nothing, and a request that continues it shares it."""
    first = client.post(CHAT, json={"messages": chat("Name a ship."), "max_tokens": 4, "session_id": "main"})
    assert first.status_code == 200
    pool = create(client, made, from_session="main", name="snapshot")
    assert pool["prefix_len"] >= first.json()["usage"]["prompt_tokens"]
    reply = client.post(
        CHAT, json={"messages": chat("Name a ship."), "max_tokens": 1, "pool_id": "snapshot", "session_id": "other"}
    )
    assert int(reply.headers["x-cached-prefix-tokens"]) >= first.json()["usage"]["prompt_tokens"] - 1


def test_f007_attach_reuses_the_pool_on_an_empty_slot(client: httpx.Client, made: list[int]) -> None:
    """An attach lands on any slot with the pool's tokens; pinning a slot beside a pool is refused by name."""
    pool = create(client, made, messages=chat("One more thing."), name="pinned")
    pinned = client.post(CHAT, json={"messages": chat("One more thing."), "max_tokens": 1, "pool_id": "pinned", "id_slot": 1})
    assert (pinned.status_code, pinned.json()["error"]["param"]) == (400, "id_slot")
    for n in range(5):
        body = {
            "messages": chat("One more thing.", f"Yes {n}", "And?"),
            "max_tokens": 1,
            "pool_id": "pinned",
            "session_id": f"s{n}",
        }
        assert int(client.post(CHAT, json=body).headers["x-cached-prefix-tokens"]) >= pool["prefix_len"] - 1


def test_wait_0_and_progress(client: httpx.Client, made: list[int]) -> None:
    """202 and then resident; a stream shows progress and ends with the pool."""
    reply = client.post("/polykv/pools?wait=0", json={"prompt": "one two three " * 40, "name": "later"})
    assert reply.status_code == 202
    made.append(reply.json()["pool_id"])
    asked = client.post("/completion", json={"prompt": "one two three " * 40 + "four", "n_predict": 1, "pool_id": "later"})
    assert int(asked.headers["x-cached-prefix-tokens"]) > 100
    assert client.get("/polykv/pools/later").json()["residency"] == "resident"
    streamed = client.post("/polykv/pools?stream=1", json={"prompt": "five six seven " * 60})
    events = [line.removeprefix("event: ") for line in streamed.text.splitlines() if line.startswith("event: ")]
    assert events[-1] == "done"
    assert set(events[:-1]) == {"progress"}
    made.append(client.get("/polykv/pools").json()["pools"][-1]["pool_id"])


def test_all_is_given_back(client: httpx.Client) -> None:
    """After releasing every pool and ending every session nothing is held: no sequence, no book, no session."""
    for pool in client.get("/polykv/pools").json()["pools"]:
        assert client.delete(f"/polykv/pools/{pool['pool_id']}").status_code == 200
    for session in client.get("/polykv/sessions").json()["sessions"]:
        client.delete(f"/polykv/sessions/{session['session_id']}")
    capacity = client.get("/polykv/capacity").json()
    assert (capacity["seq_ids_used"], capacity["n_requests"], capacity["n_sessions"]) == (0, 0, 0)
