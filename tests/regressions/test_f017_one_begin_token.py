"""F017: a template writes the begin token, the tokenizer adds one or not: there is one, and every pool agrees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.product import Product, product
from tests.models import tiny_model

pytestmark = pytest.mark.engine

BOS, BOS_TEXT = 1, "<|im_start|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
SYSTEM = "You are a terse harbourmaster. \U0001f6a2 arrives, \U0001f44d\U0001f3fd says the pilot, 東京 is far away."
CHAT = {
    "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is the keel?"}],
    "max_tokens": 1,
}


@pytest.fixture(scope="module", params=["true", "false"], ids=["tokenizer adds one", "tokenizer adds none"])
def proxy(request: pytest.FixtureRequest, engine_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    adds = f"tokenizer.ggml.add_bos_token=bool:{request.param}"
    args = ["-c", 2048, "-np", 2, "--jinja", "--chat-template", TEMPLATE, "--override-kv", adds]
    with product(engine_path, tiny_model("full"), tmp_path_factory.mktemp("f017"), args=args) as running:
        yield running


@pytest.fixture
def ids(proxy: Product) -> list[int]:
    """The real prompt of the chat request."""
    return proxy.prompt_ids("/v1/chat/completions", CHAT)


@pytest.fixture(autouse=True)
def clean(proxy: Product) -> Iterator[None]:
    yield
    for pool in proxy.get("/polykv/pools")["pools"]:
        proxy.http.delete(f"/polykv/pools/{pool['pool_id']}").raise_for_status()


def before(proxy: Product, text: str) -> str:
    """The rendered text up to `text`, as a client of the raw route has to write it: a begin token that is added is not written."""
    added = proxy.prompt_ids("/completion", {"prompt": "x"})[0] == BOS
    rendered = f"[system]\n{SYSTEM}\n[user]\n"
    return ("" if added else BOS_TEXT) + rendered[: rendered.index(text)]


def chat(proxy: Product, pool: dict[str, Any], shared: int | None = None) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Attach the chat request to a pool, on a slot without cells of its own."""
    explicit = {} if shared is None else {"shared_prefix_n_tokens": shared}
    body = {**CHAT, "pool_id": pool["pool_id"], "session_id": "t", **explicit}
    reply = proxy.http.post("/v1/chat/completions", json=body)
    proxy.http.delete("/polykv/sessions/t")
    return reply.status_code, reply.json(), dict(reply.headers)


def shares(proxy: Product, pool: dict[str, Any], ids: list[int], n: int) -> None:
    """The chat takes exactly `n` tokens of the pool and computes the rest; asking for one more is refused with the position."""
    assert proxy.pool_tokens()[:n] == ids[:n]
    status, body, headers = chat(proxy, pool)
    assert (status, headers["x-cached-prefix-tokens"]) == (200, str(n))
    assert body["opencoti"]["miss"] == (None if n else "token_mismatch")
    assert (body["usage"]["prompt_tokens"], body["timings"]["prompt_n"]) == (len(ids), len(ids) - n)
    assert chat(proxy, pool, n)[0] == 200
    status, body, _ = chat(proxy, pool, n + 1)
    assert (status, body["error"]["code"], body["error"]["first_differing_position"]) == (409, "prefix_mismatch", n)


def test_the_chat_has_one_begin_token(ids: list[int]) -> None:
    """It stands first and only there."""
    assert (ids[0], ids.count(BOS)) == (BOS, 1)


def test_pools_from_messages_text_and_ids_are_prefixes(proxy: Product, ids: list[int]) -> None:
    """All three hold the same tokens, which are those of the chat, and are shared whole."""
    system = {"messages": CHAT["messages"][:1]}  # type: ignore[index]
    n = proxy.pool(**system)["prefix_len"]
    assert n > len(proxy.prompt_ids("/completion", {"prompt": before(proxy, "is far")}))
    proxy.http.delete(f"/polykv/pools/{proxy.get('/polykv/pools')['pools'][0]['pool_id']}")
    for source in (system, {"prompt": before(proxy, "[user]") + "[user]\n"}, {"tokens": ids[:n]}):
        pool = proxy.pool(**source)
        assert proxy.pool_tokens() == ids[:n]
        shares(proxy, pool, ids, n)
        proxy.http.delete(f"/polykv/pools/{pool['pool_id']}")


def test_a_begin_token_too_many_or_too_few_is_told(proxy: Product, ids: list[int]) -> None:
    """A text with the begin token doubled, or without one, is refused at position 1 or 0, and never shared by a shift."""
    right = before(proxy, "arrives")
    wrong = BOS_TEXT + right if right.startswith("[") else right.removeprefix(BOS_TEXT)
    pool = proxy.pool(prompt=wrong)
    assert proxy.pool_tokens()[:2].count(BOS) in {0, 2}
    shares(proxy, pool, ids, proxy.pool_tokens()[:2].count(BOS) // 2)


@pytest.mark.parametrize("rest", ["bourmaster", "ster.", "arr", "rrives", "京", "\U0001f3fd", " says", "y."])
def test_a_text_that_ends_anywhere_is_cut_back(proxy: Product, ids: list[int], rest: str) -> None:
    """Inside a word, between two parts of an emoji, between characters: what is shared ends at the last token that agrees."""
    pool = proxy.pool(prompt=before(proxy, rest))
    held = proxy.pool_tokens()
    agreeing = next((n for n, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), len(held))
    assert 0 < len(held) - agreeing + 1 <= 3
    shares(proxy, pool, ids, agreeing)


def test_ids_that_end_inside_an_emoji_are_shared_whole(proxy: Product, ids: list[int]) -> None:
    """The bytes of one character are tokens of their own: a pool may end between any two of them."""
    start = len(proxy.prompt_ids("/completion", {"prompt": before(proxy, "\U0001f44d")}))
    for end in range(start, start + 6):
        pool = proxy.pool(tokens=ids[:end])
        shares(proxy, pool, ids, end)
        proxy.http.delete(f"/polykv/pools/{pool['pool_id']}")


def test_half_a_character_in_json_is_a_400(proxy: Product) -> None:
    """An unpaired surrogate names its field; no text has it, so no tokens do."""
    for field, value in (("prompt", b'"We sail \\ud83d"'), ("messages", b'[{"role":"system","content":"We sail \\uD83D"}]')):
        reply = proxy.http.post("/polykv/pools", content=b'{"%b":%b}' % (field.encode(), value))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
        assert "surrogate" in reply.json()["error"]["message"]
