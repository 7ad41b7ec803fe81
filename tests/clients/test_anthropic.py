"""Anthropic's client on `/v1/messages`, streamed and not: answers, usage, order of events and errors are the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import httpx2
import pytest

from tests.clients.conftest import said
from tests.fakes.proxy_process import Served

pytestmark = pytest.mark.engine

ASK: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Where is the keel?"}]}
LONG: list[Any] = [{"role": "user", "content": "keel " * 4000}]
"""More than the context holds."""
SYSTEM = "You are a terse assistant who knows a great deal about ships, harbours and the open sea."


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with (
        httpx2.Client(trust_env=False, timeout=120) as http,
        anthropic.Anthropic(base_url=served.url, api_key="none", http_client=http, max_retries=0) as made,
    ):
        yield made


def text(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_an_answer_is_the_engine_s(client: anthropic.Anthropic, direct: httpx.Client) -> None:
    """Text, reason to stop and counts."""
    got, want = client.messages.create(**ASK), said(direct, "/v1/messages", ASK)
    assert text(got) == want["content"][0]["text"] != ""
    assert got.stop_reason == want["stop_reason"] == "max_tokens"
    assert got.usage.output_tokens == want["usage"]["output_tokens"] == 8


def test_a_stream_is_the_same_answer(client: anthropic.Anthropic) -> None:
    """Events come in the order of the protocol, and the pieces are the whole answer with its counts."""
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert text(final) == text(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    protocol = [kind for kind in kinds if kind.startswith(("message_", "content_block_"))]
    assert protocol[0] == "message_start"
    assert protocol[1] == "content_block_start"
    assert protocol[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(protocol[2:-3]) == {"content_block_delta"}


def test_tokens_are_counted_beforehand(client: anthropic.Anthropic) -> None:
    """As many as the answer then says."""
    counted = client.messages.count_tokens(model="m", messages=ASK["messages"]).input_tokens
    usage = client.messages.create(**ASK).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_an_error_is_of_its_class(client: anthropic.Anthropic) -> None:
    """A bad request is the client's BadRequestError, streamed or not, with the engine's words."""
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="m", max_tokens=4, messages=LONG)
    with pytest.raises(anthropic.BadRequestError), client.messages.stream(model="m", max_tokens=4, messages=LONG):
        pass


def test_a_pool_is_read_from_its_cache(client: anthropic.Anthropic, served: Served) -> None:
    """F056: attached to a pool, the counts name it as read from cache, once, streamed as well."""
    made = httpx.post(
        f"{served.url}/polykv/pools", json={"messages": [{"role": "system", "content": SYSTEM}]}, trust_env=False
    ).json()
    ask = {**ASK, "system": SYSTEM, "extra_headers": {"x-pool-id": str(made["pool_id"])}}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert text(streamed) == text(whole)
    assert (whole.usage.cache_read_input_tokens or 0) >= made["prefix_len"] - 1
    assert (streamed.usage.cache_read_input_tokens or 0) >= made["prefix_len"] - 1
    httpx.delete(f"{served.url}/polykv/pools/{made['pool_id']}", trust_env=False).raise_for_status()
