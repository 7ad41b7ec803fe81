"""Which pool an agent's request goes to: shared bases, forks for children, and what to do when a pool is gone.

Law: a pool never costs a request. Where one cannot be made the request runs without, and the reason is logged. Everything made here
has a time to live; releasing early is a kindness, the lease is the truth.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from opencoti_langgraph.client import PoolClient
from opencoti_langgraph.errors import OpencotiError, PoolApiError, PoolConflictError, PoolNotFoundError
from opencoti_langgraph.prefix import N_HEAD, Divergence, Prompt, divergence, print_of
from opencoti_langgraph.results import Pool, PoolRef

T = TypeVar("T")
LOG = logging.getLogger("opencoti_langgraph")
BASE_LEASE_S = 3600.0
FORK_LEASE_S = 300.0
MAX_KNOWN = 1024
"""Bases that are remembered; one that was forgotten is found again by its name."""
MAX_HEADS = 4
"""So many system prompts of one agent, each seen once, and it is taken to change with every request."""


@dataclass(frozen=True, slots=True)
class Held:
    """A pool, what it begins with, and whose it is. As a dict it is what state keeps.

    `prints` of None: a pool that somebody gave by id; only the engine knows what it holds. `path`: ids from the root to the pool.
    `candidate`: another head that was seen once. `owner` of None: the next one whose request goes on from it gets a fork.
    """

    pool_id: PoolRef | None
    prints: list[str] | None = None
    path: list[int] = field(default_factory=list)
    owner: str | None = None
    forked: bool = False
    candidate: str | None = None

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Held | None:
        """What a graph's state says. A `pool_id` of its own there counts before what is remembered of another."""
        given, known = state.get("pool_id"), state.get("pool_prefix")
        if isinstance(known, Mapping) and known.get("pool_id") == given:
            return cls(**known)
        return None if given is None else cls(given)

    def update(self) -> dict[str, Any]:
        """The channels that say it."""
        return {"pool_id": self.pool_id, "pool_prefix": asdict(self)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes, and where its prompt left the pool that was held."""

    held: Held
    diverged: Divergence | None = None


class PoolKeeper:
    """Places requests of agents. One may serve many agents and threads."""

    def __init__(
        self,
        client: PoolClient,
        *,
        base_lease_s: float = BASE_LEASE_S,
        fork_lease_s: float = FORK_LEASE_S,
        on_divergence: Callable[[str, Divergence], None] | None = None,
    ) -> None:
        self.client = client
        self.base_lease_s, self.fork_lease_s = base_lease_s, fork_lease_s
        self._on_divergence = on_divergence
        self._lock = threading.Lock()
        self._bases: OrderedDict[str, Pool] = OrderedDict()
        self._heads: dict[str, OrderedDict[str, int]] = {}

    def place(self, prompt: Prompt, held: Held | None, session: str, kind: str) -> Place:
        """Choose the pool. `kind` names the sort of agent (its name and where it stands in the graph).

        1. Nothing held: the base pool of system prompt and tools, shared by all who have the same.
        2. A pool that was given by id: that one; the engine shares what agrees.
        3. The prompt goes on from what the pool holds: that one. Who does not own it (a child of its owner, or the owner after its
           history was rewritten) gets a fork with the history, the same for all children of that moment.
        4. A child with another system prompt or other tools: the base pool of those.
        5. The agent's own prompt changed: turns: back to the base. Head: the old pool once more, and the new base when
           it stays.
        """
        if held is None or held.pool_id is None:
            return Place(self._base(prompt, session, kind))
        if held.prints is None:
            return Place(held)
        parts = divergence(held.prints, prompt)
        mine = held.owner == session
        if parts is None:
            return Place(held if mine else self._fork(prompt, held, session))
        if not mine:
            return Place(self._base(prompt, session, kind))
        parts = self._told(parts, prompt, held, kind)
        if parts.part != "turn" and held.candidate != prompt.head:
            return Place(replace(held, candidate=prompt.head), parts)
        return Place(self._base(prompt, session, kind), parts)

    def again(self, prompt: Prompt, lost: Held, session: str, kind: str) -> Held:
        """The pool that was chosen is gone: its nearest ancestor that lives, else the base, made anew if it has to be."""
        with suppress(OpencotiError):
            if (pool_id := self.live(replace(lost, pool_id=None))) in lost.path:
                n = N_HEAD if pool_id == lost.path[0] else 0
                return Held(pool_id, (lost.prints or [])[:n] or None, lost.path[: lost.path.index(pool_id) + 1], session)
        with self._lock:
            self._bases.pop(prompt.head, None)
        return self._base(prompt, session, kind)

    def refork(self, prompt: Prompt, held: Held | None, session: str, kind: str) -> Held:
        """A branch with the whole history but its last turn, below the stable ancestor of what is held: its root, or the pool
        above one that was given by id, or the base.
        """
        below = None
        if held is not None and held.pool_id is not None:
            below = held.path[0] if held.path else self._parent(held.pool_id)
        root = self._base(prompt, session, kind) if below is None else Held(below, prompt.prints[:N_HEAD], [below], session)
        return self._fork(prompt, root, session)

    def live(self, held: Held) -> PoolRef | None:
        """The pool, or its nearest ancestor that can be used; for time travel to a checkpoint whose pool was released."""
        for pool_id in [held.pool_id, *reversed(held.path[:-1])]:
            with suppress(PoolApiError):
                if pool_id is not None and self.client.pool(pool_id, depth=0).usable:
                    return pool_id
        return None

    def retire(self, pool_id: PoolRef, *, wait: bool = False) -> None:
        """Let a pool go as soon as nobody uses it; with `wait` leave it to its lease, which is set to the fork's."""
        with suppress(OpencotiError):
            self.client.renew_pool(pool_id, ttl_s=self.fork_lease_s)
            if not wait:
                self.client.release_pool(pool_id, recursive=True)

    def leave(self, session: str, held: Held | None) -> None:
        """An agent has finished: its session ends, and its fork goes if it was the last one there."""
        with suppress(OpencotiError):
            self.client.end_session(session)
        if held is None or not held.forked or held.pool_id is None:
            return
        with suppress(OpencotiError):
            pool = self.client.pool(held.pool_id, depth=0)
            if not pool.sessions and not pool.children and not pool.n_running and not pool.pinned:
                self.client.release_pool(held.pool_id)

    def _base(self, prompt: Prompt, session: str, kind: str) -> Held:
        if not prompt.system:
            return Held(None)  # nothing that others would begin with
        pool = self._known(prompt, kind)
        if pool is None:
            return Held(None)
        return Held(pool.pool_id, prompt.prints[:N_HEAD], [pool.pool_id], session)

    def _known(self, prompt: Prompt, kind: str) -> Pool | None:
        with self._lock:
            seen = self._heads.setdefault(kind, OrderedDict())
            if prompt.head not in seen and len(seen) >= MAX_HEADS and all(n == 1 for n in seen.values()):
                # another one each time: more pools would help nobody, and the last is shared up to what changes
                LOG.warning("%s has another system prompt or other tools with every request; see late_context", kind)
                return self._bases.get(next(reversed(seen)))
            _remember(seen, prompt.head, seen.get(prompt.head, 0) + 1)
            if (pool := self._bases.get(prompt.head)) is not None:
                return pool
        try:
            pool = self.client.create_pool(**prompt.body(), name=f"lg-{prompt.head}", ttl_s=self.base_lease_s)
        except OpencotiError as error:
            LOG.warning("no base pool for %s: %s", kind, error)
            return None
        with self._lock:
            _remember(self._bases, prompt.head, pool)
        return pool

    def _parent(self, pool_id: PoolRef) -> int | None:
        with suppress(OpencotiError):
            return self.client.pool(pool_id, depth=0).parent
        return None

    def _fork(self, prompt: Prompt, held: Held, session: str) -> Held:
        n_turns = len(prompt.turns) - 1
        prints = prompt.prints[: N_HEAD + n_turns]
        stay = replace(held, owner=session, forked=False)
        if held.prints is None or len(prints) <= len(held.prints) or held.pool_id is None:
            return stay
        try:
            pool = self.client.fork_pool(
                held.pool_id, **prompt.body(n_turns), name=f"lg-{print_of(prints)}", ttl_s=self.fork_lease_s
            )
        except PoolNotFoundError:
            return stay  # its attach will find out, and go to an ancestor
        except OpencotiError as error:
            LOG.warning("no fork of pool %s: %s", held.pool_id, error)
            return stay
        return Held(pool.pool_id, prints, [*held.path, pool.pool_id], session, forked=True)

    def _told(self, parts: Divergence, prompt: Prompt, held: Held, kind: str) -> Divergence:
        """The divergence with its token position, logged without any text."""
        with suppress(PoolApiError, IndexError):
            body = {**prompt.body(len(prompt.turns)), "pool_id": held.pool_id}
            parts = replace(parts, position=self.client.match(body).prompts[0].first_differing_position)
        LOG.info("the prompt of %s leaves its pool %s in %s", kind, held.pool_id, parts)
        if self._on_divergence:
            self._on_divergence(kind, parts)
        return parts


def _remember(known: OrderedDict[str, T], key: str, value: T) -> None:
    """Put it last; the first goes when there are too many."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > MAX_KNOWN:
        known.popitem(last=False)


def gone(error: Exception) -> bool:
    """Does this say that the pool cannot be used any more?"""
    return isinstance(error, PoolNotFoundError) or (isinstance(error, PoolConflictError) and error.code == "pool_releasing")
