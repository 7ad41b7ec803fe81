"""The relay's questions, answered: `ports.RequestGate` over the runtime.

Law: `concerns` looks at bytes only; `plan` parses once, decides in the runtime, and hands back headers. The body goes to the engine
as it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from polykv_proxy.api.context import Keys, engine_keys_of
from polykv_proxy.api.life import ALIVE_S, sign_of_life
from polykv_proxy.api.scan import names_something
from polykv_proxy.api.wishes import read_wish
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Policy
from polykv_proxy.core.attach import Wish
from polykv_proxy.core.prefix import Tokens
from polykv_proxy.errors import ApiError
from polykv_proxy.ports import Header, Plan, Refusal, RelayRequest, StreamStart
from polykv_proxy.runtime.requests import Booked
from polykv_proxy.runtime.runtime import Runtime
from polykv_proxy.runtime.turns import Turn

_POOL_HEADER = b"x-pool-id"
_NO_POOL_HERE = "x-pool-id names a pool, but embeddings, rerank and audio are never computed from one; leave the header out"
_PASSED_ON = frozenset({b"authorization", b"x-api-key", b"content-type"})


class PoolGate:
    """Attaches requests to pools and sessions. `default_pool` applies to requests that name none.

    A request without a key that the engine takes is none of our business: the engine refuses it.
    """

    def __init__(self, runtime: Runtime, default_pool: str | None = None, keys: Keys | None = None) -> None:
        self._runtime = runtime
        self._default_pool = default_pool
        self._keys = keys or Keys()

    def concerns(self, request: RelayRequest) -> bool:
        """One scan of raw bytes. Never parses JSON."""
        if self._runtime.hub.absent is not None:
            return False
        if self.counts or self._runtime.admission.own(DEFAULT_SCOPE) is not None:
            return True
        if self._default_pool is not None and self._known(self._default_pool):
            return True
        return names_something(request.names, request.body)

    def objection(self, headers: Sequence[Header]) -> Refusal | None:
        """Embeddings, rerank and audio are not computed from a pool: a header that names one is 400."""
        if not self._runtime.offers_pools or not any(name.lower() == _POOL_HEADER for name, _ in headers):
            return None
        error = ApiError("invalid_request", _NO_POOL_HERE, param=_POOL_HEADER.decode())
        return Refusal(error.status, error.body(), error.headers())

    @property
    def counts(self) -> bool:
        """Is the number of requests that compute bounded?"""
        return self._runtime.admission.bounded and self._runtime.hub.absent is None

    async def count(self) -> Plan | Refusal:
        """A request that is nobody's session and uses no pool: it waits for its turn, and gives it back when its HTTP is over."""
        try:
            req, _ = await self._runtime.requests.enter_plain()
        except ApiError as error:
            return Refusal(error.status, error.body(), error.headers())
        return Plan((), _nothing, partial(self._runtime.admission.over, req))

    async def plan(self, request: RelayRequest, waiting: StreamStart) -> Plan | Refusal:
        """The headers that attach a request, or an answer of ours."""
        if not self._keys.accepts_any(engine_keys_of(request.headers)):
            return _PLAIN
        if not self._runtime.hub.linked:
            await self._runtime.link.settled()
        if not self._runtime.offers_pools:
            return _PLAIN
        try:
            wish = read_wish(request.headers, request.body, self._default_pool, self._known)
            if wish.pool is None and wish.session_id is None and self._runtime.admission.own(DEFAULT_SCOPE) is None:
                return await self.count() if self.counts else _PLAIN
            booked = await self._book(wish, request, waiting)
        except ApiError as error:
            return Refusal(error.status, error.body(), error.headers())
        return self._planned(booked, wish, request)

    async def _book(self, wish: Wish, request: RelayRequest, waiting: StreamStart) -> Booked:
        """Book it; while it is held, its stream is kept alive where the policy wants that."""
        alive: list[asyncio.Task[None]] = []

        def held(policy: Policy) -> None:
            events = sign_of_life(request.target, policy.while_held) if wish.stream else None
            if events is not None:
                alive.append(asyncio.ensure_future(_keep_alive(waiting, events)))

        try:
            return await self._runtime.requests.book(wish, partial(self._dry_run, request), held)
        finally:
            for task in alive:
                task.cancel()

    def _known(self, key: str | int) -> bool:
        return self._runtime.hub.ledger.tree.find(key) is not None

    async def _dry_run(self, request: RelayRequest) -> list[Tokens]:
        headers = [(name, value) for name, value in request.headers if name.lower() in _PASSED_ON]
        return await self._runtime.hub.client.dry_run(request.target.decode("latin-1"), request.body, headers)

    def _planned(self, booked: Booked, wish: Wish, request: RelayRequest) -> Plan:
        desk = self._runtime.requests
        kept = request if wish.session_id is not None else None
        statuses: list[int] = []

        def reply(status: int, headers: Sequence[Header]) -> Sequence[Header]:
            statuses.append(status)
            if kept is not None and wish.session_id is not None and status < 400:
                self._runtime.pools.turns.keep(wish.session_id, self._turn(kept))
            return desk.reply_headers(booked, wish, headers)

        def done() -> None:
            desk.http_done(booked, refused=any(status >= 400 for status in statuses))

        return Plan(desk.engine_headers(booked), reply, done)

    def _turn(self, request: RelayRequest) -> Turn:
        """What a session without KV can be computed from again. Keys are not kept: the proxy asks the engine with its own."""
        read_by = tuple((name, value) for name, value in request.headers if name.lower() == b"content-type")
        return Turn(request.target.decode("latin-1"), request.body, read_by, self._runtime.hub.clock.wall())


async def _keep_alive(waiting: StreamStart, events: bytes) -> None:
    while True:
        waiting(events)
        await asyncio.sleep(ALIVE_S)


def _nothing(_status: int, _headers: Sequence[Header]) -> Sequence[Header]:
    return ()


_PLAIN = Plan((), _nothing, lambda: None)
