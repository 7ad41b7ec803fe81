"""Protocols between rooms: what one room needs of another, with no code of either.

Law: types and Protocols only; imports `errors` and `core`, nothing else of ours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from polykv_proxy.errors import ApiError

Header: TypeAlias = tuple[bytes, bytes]
"""One header field as it came: name in any case, value without surrounding white space."""


StreamStart: TypeAlias = Callable[[bytes], None]
"""Takes whole events of an event stream."""


def names_of(headers: Iterable[Header]) -> frozenset[bytes]:
    """The names of these fields, in lower case."""
    return frozenset([name.lower() for name, _ in headers])


class RelayRequest(NamedTuple):
    """A request on a generating route, read whole. `target` is the raw request target, `body` the decoded body bytes, `names` are
    those of its headers in lower case.
    """

    method: bytes
    target: bytes
    headers: Sequence[Header]
    body: bytes
    names: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer of ours in place of the engine's."""

    status: int
    body: bytes
    headers: Sequence[Header] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """How the relay sends a request that named a pool or a session.

    `engine_headers` are added to the relayed request. `reply_headers` is called once with the engine's status and headers and
    returns the headers that the client sees added (the relay itself removes `x-polykv-*`). `done` is called exactly once, when the
    HTTP exchange is over for whatever reason; books close on the engine's events, not here.
    """

    engine_headers: Sequence[Header]
    reply_headers: Callable[[int, Sequence[Header]], Sequence[Header]]
    done: Callable[[], None]


class RequestGate(Protocol):
    """What the relay asks about requests on generating routes."""

    def concerns(self, request: RelayRequest) -> bool:
        """One scan of raw bytes: does this request name a pool or session, or does a default apply? Never parses JSON."""

    def objection(self, headers: Sequence[Header]) -> Refusal | None:
        """What is wrong with the fields of a request that computes and can never use a pool; its body is not looked at."""

    def plan(self, request: RelayRequest, waiting: StreamStart) -> Awaitable[Plan | Refusal]:
        """Decide a request for which `concerns` said yes; cancelled when the client leaves.

        May wait: for admission, for a pool that is rebuilt. `waiting` begins an event stream before the engine has answered, or
        goes on with it.
        """

    @property
    def counts(self) -> bool:
        """Does each request that computes count, also one that can never use a pool?"""

    def count(self) -> Awaitable[Plan | Refusal]:
        """Wait until such a request may run; cancelled when the client leaves."""


class Waiting(Protocol):
    """A request to which the engine owes an answer."""

    def cut(self, error: ApiError) -> None:
        """End it now with this error, in the form that its reply still allows; its engine connection is closed."""
        ...


class Clock(Protocol):
    """Time. `monotonic` in seconds for durations, `wall` as Unix seconds for stamps."""

    def monotonic(self) -> float:
        """Seconds; only differences mean anything."""
        ...

    def wall(self) -> float:
        """Unix seconds."""
        ...


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where the engine listens: a unix socket path, or host and port."""

    uds: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    headers: Sequence[Header] = field(default=())
