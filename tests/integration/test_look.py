"""`tokens`, `text`, `diff` and `match`, over the fake engine."""

from pathlib import Path

import pytest

from tests.integration.rig import rig

SYSTEM = "You are a careful agent with many tools and a long memory"
OTHER = SYSTEM.replace("many", "few")


async def test_a_pool_reads_back_as_tokens_and_as_text(tmp_path: Path) -> None:
    """Tokens are those of its prefix, the text is theirs; an evicted pool has them too."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM, name="p")
        await proxy.api.post("/polykv/pools/p/evict")
        tokens = (await proxy.api.get("/polykv/pools/p/tokens")).json()
        assert tokens["tokens"] == proxy.engine.tokenizer.encode(SYSTEM)
        assert (await proxy.api.get("/polykv/pools/1/text")).json() == {"pool_id": 1, "prefix_len": 13, "text": SYSTEM}
        assert (await proxy.api.get("/polykv/pools/9/text")).status_code == 404


async def test_a_diff_shows_where_two_pools_part(tmp_path: Path) -> None:
    """The common length, the next token of either side, and the text around the place."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM, name="a")
        await proxy.pool(prompt=OTHER, name="b")
        found = (await proxy.api.get("/polykv/diff?a=a&b=2")).json()
        assert (found["common_len"], found["equal"]) == (7, False)
        assert "many" in found["a"]["text"]
        assert "few" in found["b"]["text"]
        assert found["a"]["next_token"] != found["b"]["next_token"]
        await proxy.pool(prompt=f"{SYSTEM} and more", name="c")
        found = (await proxy.api.get("/polykv/diff?a=1&b=c")).json()
        assert (found["common_len"], found["a"]["next_token"], found["b"]["prefix_len"]) == (13, None, 15)
        assert (await proxy.api.get("/polykv/diff?a=a&b=a")).json()["equal"] is True
        assert (await proxy.api.get("/polykv/diff?a=a")).json()["error"]["param"] == "b"
        assert (await proxy.api.get("/polykv/diff?a=a&b=x")).status_code == 404


@pytest.mark.parametrize(
    ("text", "more", "n_matched", "n_shared", "why"),
    [
        (f"{SYSTEM} now go", {"pool_id": "p"}, 13, 13, None),
        (SYSTEM, {"pool_id": 1}, 13, 12, "last token is always computed"),
        (OTHER, {"model": "m@p"}, 7, 7, "differ at position 7"),
        (f"{SYSTEM} now", {"pool_id": 1, "shared_prefix_n_tokens": 5}, 13, 5, "asks for less"),
        ("You are", {"pool_id": 1}, 3, 2, "ends within the pool"),
    ],
)
async def test_a_dry_match_is_what_the_request_then_shares(
    tmp_path: Path, text: str, more: dict, n_matched: int, n_shared: int, why: str | None
) -> None:
    """What is said beforehand is what the engine shares; nothing is computed, attached or booked by asking."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM, name="p")
        before = (proxy.engine.computed, (await proxy.api.get("/polykv/pools")).json())
        (found,) = (await proxy.api.post("/polykv/match", json={"prompt": text, **more})).json()["prompts"]
        assert (proxy.engine.computed, (await proxy.api.get("/polykv/pools")).json()) == before
        assert (found["pool_id"], found["attaches"], found["n_matched"], found["n_shared"]) == (1, True, n_matched, n_shared)
        assert found["why_not"] is None if why is None else why in found["why_not"]
        assert len(proxy.runtime.hub.ledger.books) == 0
        reply = await proxy.call("/completion", {"prompt": text, "n_predict": 1, **more})
        assert reply.headers["x-cached-prefix-tokens"] == str(n_shared)


async def test_a_request_without_a_pool_is_told_the_nearest(tmp_path: Path) -> None:
    """Of all pools the one with the longest match is named, with the text where they part; nothing would attach."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt="You are late", name="near")
        await proxy.pool(prompt=SYSTEM, name="nearer")
        (found,) = (await proxy.api.post("/polykv/match", json={"prompt": OTHER})).json()["prompts"]
        assert (found["name"], found["attaches"], found["n_matched"], found["n_shared"]) == ("nearer", False, 7, 0)
        assert found["first_differing_position"] == 7
        assert ("many" in found["pool_text"], "few" in found["prompt_text"]) == (True, True)
        assert "names no pool" in found["why_not"]
        both = (await proxy.api.post("/polykv/match", json={"prompt": [OTHER, "zzz"]})).json()["prompts"]
        assert [one["name"] for one in both] == ["nearer", "near"], "the begin token is common to all"


async def test_the_default_pool_and_chats_are_matched_as_on_their_routes(tmp_path: Path) -> None:
    """The default applies here as there; the route follows from the body, or is asked for."""
    async with rig(tmp_path, default_pool="d") as proxy:
        await proxy.pool(messages=[{"role": "system", "content": SYSTEM}], name="d")
        chat = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hi"}]}
        reply = (await proxy.api.post("/polykv/match", json=chat)).json()
        assert (reply["route"], reply["prompts"][0]["attaches"]) == ("/v1/chat/completions", True)
        assert (await proxy.api.post("/polykv/match?route=/chat/completions", json=chat)).json()["prompts"] == reply["prompts"]


@pytest.mark.parametrize(
    ("query", "body", "status"),
    [
        ("?route=/slots", '{"prompt": "x"}', 400),
        ("", "{", 400),
        ("", "[1]", 400),
        ("", '{"prompt": "x", "pool_id": 7}', 404),
        ("", '{"prompt": "x", "pool_id": ""}', 400),
        ("", '{"n_predict": 3}', 400),
    ],
)
async def test_a_match_refuses_what_the_request_would_be_refused_for(tmp_path: Path, query: str, body: str, status: int) -> None:
    """Bad routes, bodies and pools are answered as errors."""
    async with rig(tmp_path) as proxy:
        await proxy.pool(prompt=SYSTEM)
        assert (await proxy.api.post(f"/polykv/match{query}", content=body)).status_code == status
