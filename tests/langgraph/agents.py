"""A LangChain model and a pool client on the real proxy with a tiny engine, for tests of what agents do there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opencoti_langgraph import OpencotiChatModel, PoolClient
from tests.langgraph.real import N_CTX, served_tiny

SYSTEM = "You are a terse assistant who knows a great deal about ships, harbours and the open sea."


@contextmanager
def clients(engine: Path, folder: Path) -> Iterator[PoolClient]:
    """A client of a proxy of its own."""
    with served_tiny(engine, folder) as served, PoolClient(served.url) as client:
        yield client


def model_of(client: PoolClient) -> OpencotiChatModel:
    """A model behind the client's proxy: greedy, six tokens an answer."""
    return OpencotiChatModel(base_url=f"{client.base_url}/v1", max_tokens=6, temperature=0, n_ctx=N_CTX)


def give_back(client: PoolClient) -> None:
    """End all sessions, release all pools."""
    for session in client.sessions().sessions:
        if session.session_id:
            client.end_session(session.session_id)
    for pool in client.pools().pools:
        if pool.parent is None:
            client.release_pool(pool.pool_id, recursive=True)


def cached(message: Any) -> int:
    """Prompt tokens that were not computed."""
    return int(message.usage_metadata["input_token_details"]["cache_read"])
