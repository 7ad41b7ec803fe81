"""What the examples have in common: options, a model, and the figures in the end."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from langchain_core.messages import AIMessage

from opencoti_langgraph.chat_models import OpencotiChatModel
from opencoti_langgraph.client import PoolClient
from opencoti_langgraph.wire import DEFAULT_URL

SYSTEM = """You are one of a crew that looks after a harbour. Answer in one short sentence.
The harbour has three piers. Sailing boats moor at the north pier, fishing boats at the middle one, ferries at the south one. Each
pier has a crane, a fresh-water tap and a lamp that is lit at dusk. The tide is told by a board beside the office, open from
six to ten.
Boats report by radio before they come in. In a storm all of them go to the lee of the breakwater and wait there for the pilot."""


@dataclass
class Show:
    """A running example: its clients, and the replies whose figures count."""

    client: PoolClient
    model: OpencotiChatModel
    replies: list[AIMessage] = field(default_factory=list)

    def saw(self, reply: AIMessage) -> AIMessage:
        """Note a reply."""
        self.replies.append(reply)
        return reply

    @property
    def n_cached(self) -> int:
        """Prompt tokens that were not computed."""
        used = [reply.usage_metadata for reply in self.replies if reply.usage_metadata]
        return sum(usage.get("input_token_details", {}).get("cache_read", 0) for usage in used)

    @property
    def n_prompt(self) -> int:
        """Prompt tokens in all."""
        return sum(reply.usage_metadata["input_tokens"] for reply in self.replies if reply.usage_metadata)

    def tell(self) -> None:
        """The figures."""
        speeds = [tps for reply in self.replies if (tps := reply.response_metadata.get("session_tps"))]
        mean = f"{sum(speeds) / len(speeds):.1f}" if speeds else "unknown"
        print(
            f"{len(self.replies)} replies, {self.n_prompt} prompt tokens, prefill saved: {self.n_cached} tokens, mean tps: {mean}"
        )


@contextmanager
def show(what: str) -> Iterator[Show]:
    """Read the options, run, print the figures, release what the example made."""
    options = argparse.ArgumentParser(description=what)
    options.add_argument("--url", default=DEFAULT_URL, help="where the proxy listens")
    options.add_argument("--api-key", default=None)
    options.add_argument("--max-tokens", type=int, default=16, help="of each answer")
    given = options.parse_args()
    with PoolClient(given.url, api_key=given.api_key) as client:
        before = {pool.pool_id for pool in client.pools().pools}
        key = {"api_key": given.api_key} if given.api_key else {}
        model = OpencotiChatModel(base_url=f"{client.base_url}/v1", max_tokens=given.max_tokens, temperature=0, **key)
        running = Show(client, model)
        try:
            yield running
            running.tell()
        finally:
            for session in client.sessions().sessions:
                if session.session_id and session.pool_id is not None and session.pool_id not in before:
                    client.end_session(session.session_id)
            for pool in client.pools().pools:
                if pool.parent is None and pool.pool_id not in before:
                    client.release_pool(pool.pool_id, recursive=True)
