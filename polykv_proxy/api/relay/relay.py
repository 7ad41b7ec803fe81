"""What all client connections share: routes, the engine's door, the gate, additions, limits, and the exchanges in flight.

Law: no bytes pass here. Draining is decided here and carried out by the exchanges.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from polykv_proxy.api.relay.known import Cut, Known, KnownRequest, is_plain
from polykv_proxy.api.relay.targets import Routes, Where, decoded_path
from polykv_proxy.api.relay.upstream_pool import UpstreamPool
from polykv_proxy.core.tally import Ending, RelayTally
from polykv_proxy.errors import ApiError
from polykv_proxy.ports import RequestGate

if TYPE_CHECKING:
    from polykv_proxy.api.relay.exchange import Exchange


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Bounds in bytes and seconds."""

    scanned_body: int = 64 * 1024 * 1024
    """Largest body of a generating route while a gate is installed; none elsewhere."""
    head: int = 64 * 1024
    """Largest request line plus fields."""
    buffered: int = 64 * 1024
    """Bytes of one request kept for an engine that is not ready for them before the client is made to wait."""
    pipelined: int = 8
    """Requests read ahead on one connection."""
    keep_alive_s: float = 75.0
    """How long an idle client connection is kept."""
    stall_s: float = 60.0
    """How long a client may take for a whole head, and for each further piece of a body while it is read."""
    connections: int = 4096
    """Client connections at once."""


class RelayObserver(Protocol):
    """Is told of each exchange."""

    def began(self, exchange: Exchange) -> Context | None:
        """It begins. The context in which the gate decides about it, where that is to be another."""
        ...

    def ended(self, exchange: Exchange) -> None:
        """It is over: `ending` and `status` are known."""
        ...


class Relay:
    """One relay. `gate` and `additions` may be set or removed at any time; without them all is pumped straight through."""

    def __init__(self, pool: UpstreamPool, *, routes: Routes | None = None, limits: RelayLimits | None = None) -> None:
        self.pool = pool
        self.routes = routes or Routes()
        self.limits = limits or RelayLimits()
        self.gate: RequestGate | None = None
        self.tally = RelayTally()
        self.additions: Callable[[bytes], Callable[[bytes], bytes | None] | None] | None = None
        """For the decoded path of a page: what makes another page of it, or None."""
        self.on_post: Callable[[], None] = lambda: None
        """Called when a request begins that may make the engine work."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when a connection to the engine was refused, or broke under a request, before that request ends."""
        self.echoes = True
        """Whether a reply carries the id that its request came with."""
        self.observers: list[RelayObserver] = []
        self.running: set[Exchange] = set()
        self.known: Known[KnownRequest] = Known()
        self.n_relayed = 0
        self._draining: ApiError | None = None
        self._last_left = asyncio.Event()

    def learn(self, exchange: Exchange, data: bytes, came: Cut) -> bool:
        """Keep what was made of the head with which these bytes begin, if it is new, of this exchange, and has nothing special."""
        shape, digits, _ = came
        method, target, headers = exchange.method, exchange.target, exchange.headers
        where = self.routes.where(method, target)
        if self.known.get(shape) is not None or not (where is Where.ENGINE or (where is Where.GENERATE and digits)):
            return False
        if not is_plain(data, came, b"%b %b HTTP/1.1" % (method, target), headers, exchange.framing):
            return False
        made = KnownRequest.of(method, target, headers, generates=where is Where.GENERATE)
        if made is not None:
            self.known.learn(shape, made)
        return made is not None

    @property
    def refusal(self) -> ApiError | None:
        """Why new requests are refused now; None while they are welcome."""
        return self._draining or self.pool.refusal

    @property
    def draining(self) -> bool:
        """True once `drain` was called."""
        return self._draining is not None

    def amendment(self, method: bytes, target: bytes) -> Callable[[bytes], bytes | None] | None:
        """What is added to the engine's reply to this request."""
        if self.additions is None or method != b"GET":
            return None
        return self.additions(decoded_path(target))

    def enter(self, exchange: Exchange) -> None:
        """An exchange begins."""
        self.running.add(exchange)
        for observer in self.observers:
            exchange.context = observer.began(exchange) or exchange.context
        if exchange.method == b"POST":
            self.on_post()
        self.n_relayed += 1

    def leave(self, exchange: Exchange) -> None:
        """An exchange is over, for whatever reason."""
        self.running.discard(exchange)
        for observer in self.observers:
            observer.ended(exchange)
        self.tally.ended[self.routes.kind(exchange.target), exchange.ending or Ending.CUT] += 1
        if self._draining is not None and not self.running:
            self._last_left.set()

    @property
    def n_generating(self) -> int:
        """Requests in flight on generating routes, wherever they are."""
        return sum(exchange.generates for exchange in self.running)

    def owed(self) -> list[Exchange]:
        """Requests on generating routes that wait for the engine and for nothing else."""
        return [exchange for exchange in self.running if exchange.owed]

    def drain(self, retry_after_s: float = 5.0) -> None:
        """Refuse new requests from now on; those in flight go on."""
        self._draining = ApiError("draining", "The proxy is shutting down.", retry_after_s=retry_after_s)

    async def drained(self) -> None:
        """Wait until nothing is in flight, after `drain`."""
        while self.running:
            self._last_left.clear()
            await self._last_left.wait()

    def cut(self, code: str, message: str) -> None:
        """End what is in flight: event streams with an error event, requests without a reply with a 503, others by closing."""
        for exchange in list(self.running):
            exchange.cut(ApiError(code, message, retry_after_s=5))
