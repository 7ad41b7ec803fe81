"""What a caller orders, how far it is, and what came of it.

Law: values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polykv_proxy.core.admission.policy import Policy
from polykv_proxy.core.prefix import Tokens
from polykv_proxy.engine import wire
from polykv_proxy.runtime.flight import Flight
from polykv_proxy.runtime.prefixes import Conversation


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What a caller asked for: exactly one of tokens, prompt, conversation, from_session.

    `rebuild`: a session without KV gives the prompt of its last turn, computed again.
    With a `parent` it is a fork; `branch_pos` None takes the longest common prefix. `beside` is a pool that it takes the place of:
    the first `keep_to` tokens are taken from there (None: all that agree), and its parent becomes the parent of the new one.
    """

    tokens: Tokens | None = None
    prompt: str | None = None
    conversation: Conversation | None = None
    from_session: str | None = None
    n_tokens: int | None = None
    rebuild: bool = False
    name: str | None = None
    ttl_s: float | None = None
    parent: int | None = None
    branch_pos: int | None = None
    beside: int | None = None
    keep_to: int | None = None

    @property
    def source(self) -> str:
        """The field that gave the prefix."""
        if self.from_session is not None:
            return "from_session"
        if self.conversation is not None:
            return "messages"
        return "prompt" if self.prompt is not None else "tokens"


@dataclass(frozen=True, slots=True)
class Lease:
    """A declared pin: `lease_s` seconds from the start of the proxy, without end when None."""

    owner: str | None
    lease_s: float | None


@dataclass(frozen=True, slots=True)
class Declared:
    """A pool as it is to be. `pin` False takes a pin away, None leaves it as it is. `admission` None: the file has none."""

    name: str
    spec: PoolSpec
    parent: str | None = None
    pin: Lease | Literal[False] | None = None
    admission: Policy | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """How far a pool is."""

    pool_id: int
    progress: wire.Progress | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A pool that is there: 201 when it was made, 200 when one of that name and prefix was there before. `reply` is JSON.

    `restored`: its KV was read from disk.
    """

    pool_id: int
    status: int
    reply: str
    restored: bool = False


PoolFlight = Flight[Made, Step]
