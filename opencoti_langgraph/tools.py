"""Pools as tools that an agent may call.

Law: reading is for everybody, changing only for whom it was opened (`allow`): a model seldom has reason to make or release pools.
Answers are a few short lines; an error of the proxy is an answer too, so that the agent can act on it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.prebuilt import ToolRuntime
from langgraph.types import Command

from opencoti_langgraph.client import PoolClient
from opencoti_langgraph.errors import OpencotiError
from opencoti_langgraph.results import Pool
from opencoti_langgraph.room import Ask, look, startable

P = ParamSpec("P")
READING = frozenset({"pool_status", "session_tps", "capacity"})
CHANGING = frozenset({"create_pool", "fork_pool", "release_pool", "pin_pool", "unpin_pool"})
MOST = 20
"""Pools or sessions in one answer."""
TTL_S = 600.0
"""Pools that an agent makes go when nobody has used them for so long."""


def make_pool_tools(client: PoolClient, *, allow: Iterable[str] = READING, into_state: bool = False) -> list[BaseTool]:
    """Tools for an agent.

    Args:
        client: Of the proxy.
        allow: Names out of `READING` (the default) and `CHANGING`.
        into_state: Creating and forking also write `pool_id` into the graph's state, which needs that channel.
    """
    wanted = set(allow)
    if unknown := wanted - READING - CHANGING:
        raise ValueError(f"unknown tools: {', '.join(sorted(unknown))}; known are {', '.join(sorted(READING | CHANGING))}")
    verbs = _Verbs(client, into_state=into_state)
    return [StructuredTool.from_function(_told(getattr(verbs, name)), name=name, parse_docstring=True) for name in sorted(wanted)]


def _told(verb: Callable[P, Any]) -> Callable[P, Any]:
    """Errors of the proxy become answers."""

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return verb(*args, **kwargs)
        except OpencotiError as error:
            return f"error: {error}"

    return call


class _Verbs:
    """The tools. Their docstrings are what the model reads."""

    def __init__(self, client: PoolClient, *, into_state: bool) -> None:
        self._client = client
        self._into_state = into_state

    def pool_status(self, pool: str | None = None) -> str:
        """Show shared prompt pools: id, name, parent, length in tokens, where their memory is, and how many sessions use each.

        Args:
            pool: Id or name of one pool, to see it and what is below it. Leave it out for all pools.
        """
        found = self._client.pools().pools if pool is None else [one := self._client.pool(pool), *(one.subtree or [])]
        return _lines([_brief(one) for one in found])

    def session_tps(self) -> str:
        """Show how fast each running session really is, in tokens per second, and the mean of all."""
        now = self._client.tps_now(running=True)
        rows = [{"session": s.session_id, "pool": s.pool_id, "state": s.state, "tps": _round(s.tps_ewma)} for s in now.sessions]
        return _lines([{"mean_tps": _round(now.mean_active_tps), "total_tps": _round(now.aggregate_tps)}, *rows])

    def capacity(self, pool: str | None = None, expected_tokens: int | None = None) -> str:
        """Ask whether more agents can start now, and how many, before starting them.

        Args:
            pool: Id or name of the pool that they would use.
            expected_tokens: Tokens that each would need for itself, if known.
        """
        found = look(self._client, Ask(pool, expected_tokens))
        facts = {"can_start": startable(found), "reason": found.reason, "mean_tps": _round(found.mean_active_tps)}
        return _lines([{**facts, "settling": found.settling or None, "compaction_pressure": _round(found.compaction_pressure)}])

    def create_pool(self, name: str, runtime: ToolRuntime, context: str | None = None, from_session: str | None = None) -> Any:
        """Make a shared pool that other agents can start from without computing it again.

        Args:
            name: Lower-case letters, digits, `_`, `-` and `.`.
            context: The text that they share, as a system prompt. Give this or from_session.
            from_session: A running session whose whole context becomes the pool.
        """
        source: dict[str, Any] = {"from_session": from_session} if from_session else {"messages": _system(context)}
        return self._made(self._client.create_pool(name=name, ttl_s=TTL_S, **source), runtime)

    def fork_pool(
        self, pool: str, name: str, runtime: ToolRuntime, context: str | None = None, from_session: str | None = None
    ) -> Any:
        """Make a pool that shares its beginning with another and goes on differently.

        Args:
            pool: Id or name of the pool to start from.
            name: Of the new pool: lower-case letters, digits, `_`, `-` and `.`.
            context: The new pool's whole text, as a system prompt; what agrees with the other pool is shared.
            from_session: A running session whose whole context becomes the pool.
        """
        source: dict[str, Any] = {"from_session": from_session} if from_session else {"messages": _system(context)}
        return self._made(self._client.fork_pool(pool, name=name, ttl_s=TTL_S, **source), runtime)

    def release_pool(self, pool: str) -> str:
        """Give up a pool that nobody needs any more.

        Args:
            pool: Its id or name.
        """
        done = self._client.release_pool(pool)
        return _lines([{"pool": done.pool_id, "released": done.released, "still_running": done.n_running or None}])

    def pin_pool(self, pool: str, seconds: float = 600) -> str:
        """Keep a pool's memory for a while, also when nobody uses it.

        Args:
            pool: Its id or name.
            seconds: For how long.
        """
        return _lines([_brief(self._client.pin_pool(pool, owner="agent", lease=seconds))])

    def unpin_pool(self, pool: str) -> str:
        """Let a pool go that was pinned before.

        Args:
            pool: Its id or name.
        """
        return _lines([_brief(self._client.unpin_pool(pool, owner="agent"))])

    def _made(self, pool: Pool, runtime: ToolRuntime) -> Any:
        text = _lines([_brief(pool)])
        if not self._into_state:
            return text
        return Command(update={"pool_id": pool.pool_id, "messages": [ToolMessage(text, tool_call_id=runtime.tool_call_id)]})


def _system(context: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": context}] if context else []


def _brief(pool: Pool) -> dict[str, Any]:
    facts = {"pool": pool.pool_id, "name": pool.name, "parent": pool.parent, "tokens": pool.prefix_len}
    return {**facts, "residency": pool.residency, "sessions": len(pool.sessions) or None, "pinned": pool.pinned or None}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _lines(rows: list[Mapping[str, Any]]) -> str:  # one JSON object a line, without what is not known
    shown = [json.dumps({key: value for key, value in row.items() if value is not None}) for row in rows[:MOST]]
    return "\n".join([*shown, *([f"… {len(rows) - MOST} more"] if len(rows) > MOST else [])]) or "none"
