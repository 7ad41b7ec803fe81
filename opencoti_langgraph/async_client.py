"""`AsyncPoolClient`: the same verbs for asyncio.

Law: as in `client`. Connections belong to the event loop that opened them, so one client may serve several loops, one after the
other or at once.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import httpx
from httpx_sse import aconnect_sse

from opencoti_langgraph import calls
from opencoti_langgraph.calls import Call
from opencoti_langgraph.compacting import Refork, refork
from opencoti_langgraph.errors import OpencotiError, PoolUnavailableError, ProxyUnreachableError
from opencoti_langgraph.loops import PerLoop
from opencoti_langgraph.results import Event, Pool, PoolRef, Progress, Tps
from opencoti_langgraph.wire import (
    DEFAULT_URL,
    RETRIES,
    STREAM_TIMEOUT,
    TIMEOUT,
    Position,
    error_in_stream,
    error_of,
    headers_of,
    pause_s,
    result_of,
    root_of,
    unreachable,
)

P = ParamSpec("P")
T = TypeVar("T")


def _verb(make: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncPoolClient, P], Coroutine[Any, Any, T]]:
    @functools.wraps(make)
    async def send(client: AsyncPoolClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client.send(make(*args, **kwargs))

    return send


class AsyncPoolClient:
    """A client of one proxy; arguments as for `PoolClient`.

    Args:
        base_url: Where it listens; an OpenAI base URL (`…/v1`) will do.
        api_key: The proxy's key, if it has one.
        timeout: For each request; by default only connecting is bounded.
        retries: How often a repeatable call is sent again after its connection broke.
        transport: Makes the transport of each event loop's connections, for tests.
        sleep: How to wait, for tests.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: httpx.Timeout | float | None = TIMEOUT,
        retries: int = RETRIES,
        transport: Callable[[], httpx.AsyncBaseTransport] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.base_url = root_of(base_url)
        self._headers = headers_of(api_key)
        self._timeout = timeout
        self._transport = transport
        self._retries = retries
        self._sleep = sleep
        self._http: PerLoop[httpx.AsyncClient] = PerLoop(self._connected, httpx.AsyncClient.aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close this event loop's connections."""
        await self._http.close()

    def _connected(self) -> httpx.AsyncClient:
        transport = self._transport() if self._transport else None
        return httpx.AsyncClient(base_url=self.base_url, timeout=self._timeout, transport=transport)

    async def send(self, call: Call[T]) -> T:
        """Send one call. PoolApiError for an error answer, ProxyUnreachableError when nobody answers."""
        attempt = 0
        while True:
            try:
                reply = await (await self._http.get()).request(
                    call.method, call.path, json=call.json, params=call.params, headers={**self._headers, **call.headers}
                )
            except httpx.TransportError as error:
                if attempt >= (self._retries if call.repeatable else 0):
                    raise ProxyUnreachableError(unreachable(self.base_url, error)) from error
                await self._sleep(pause_s(attempt))
                attempt += 1
            else:
                return result_of(call, reply)

    create_pool = _verb(calls.create_pool)
    fork_pool = _verb(calls.fork_pool)
    compact_pool = _verb(calls.compact_pool)
    pools = _verb(calls.pools)
    pool = _verb(calls.pool)
    release_pool = _verb(calls.release_pool)
    pin_pool = _verb(calls.pin_pool)
    unpin_pool = _verb(calls.unpin_pool)
    renew_pool = _verb(calls.renew_pool)
    evict_pool = _verb(calls.evict_pool)
    flush_pool = _verb(calls.flush_pool)
    verify_pool = _verb(calls.verify_pool)
    pool_tokens = _verb(calls.pool_tokens)
    pool_text = _verb(calls.pool_text)
    diff = _verb(calls.diff)
    match = _verb(calls.match)
    sessions = _verb(calls.sessions)
    session = _verb(calls.session)
    end_session = _verb(calls.end_session)
    capacity = _verb(calls.capacity)
    admission = _verb(calls.admission)
    set_admission = _verb(calls.set_admission)
    clear_admission = _verb(calls.clear_admission)
    decisions = _verb(calls.decisions)
    tps_now = _verb(calls.tps_now)
    savings = _verb(calls.savings)
    health = _verb(calls.health)
    tokenize = _verb(calls.tokenize)
    detokenize = _verb(calls.detokenize)
    render = _verb(calls.render)
    count_tokens = _verb(calls.count_tokens)

    async def compact_by_refork(self, old: PoolRef, *, release: bool = True, **new: Any) -> Refork:
        """As `PoolClient.compact_by_refork`."""
        return await self._steps(refork(old, new, release=release))

    async def _steps(self, steps: Generator[Call[Any], Any, T]) -> T:
        call = next(steps)
        try:
            while True:
                try:
                    answer = await self.send(call)
                except OpencotiError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as end:
            return cast("T", end.value)

    def watch_create(self, **body: Any) -> AsyncIterator[Progress | Pool]:
        """Make a pool as `create_pool` does, telling how far it is; the last item is the pool."""
        return self._watch(calls.create_pool(**body))

    def watch_fork(self, pool: PoolRef, **body: Any) -> AsyncIterator[Progress | Pool]:
        """Fork a pool as `fork_pool` does, telling how far it is; the last item is the pool."""
        return self._watch(calls.fork_pool(pool, **body))

    async def tps(self, *, interval_ms: int | None = None, running: bool = False) -> AsyncIterator[Tps]:
        """Speeds, live and without end; opened again whenever the connection breaks."""
        params = {**({"interval_ms": str(interval_ms)} if interval_ms else {}), **({"running": "1"} if running else {})}
        async for _, data in self._events("/polykv/tps", params):
            yield Tps.model_validate(data)

    async def events(self, *, topics: Sequence[str] | None = None, last_event_id: str | None = None) -> AsyncIterator[Event]:
        """What happens, from now on or after `last_event_id`, over reconnections. After `resync` look at the listings."""
        params = {"topics": ",".join(topics)} if topics else {}
        async for topic, data in self._events("/polykv/events", params, last_event_id):
            yield Event.model_validate({**data, "topic": topic})

    async def _watch(self, call: Call[Pool]) -> AsyncIterator[Progress | Pool]:
        params = {**call.params, "stream": "1"}
        async with aconnect_sse(
            await self._http.get(), call.method, call.path, json=call.json, params=params, headers={**self._headers, **call.headers}
        ) as source:
            if not source.response.is_success:
                await source.response.aread()
                raise error_of(source.response, f"{call.method} {call.path}")
            async for event in source.aiter_sse():
                if event.event == "error":
                    raise error_in_stream(event.json(), call.path)
                if event.event == "done":
                    yield call.read(event.json().get("pool", event.json()))
                    return
                yield Progress.model_validate(event.json())
        raise ProxyUnreachableError(f"{self.base_url}{call.path}: the stream ended before the pool was made")

    async def _events(self, path: str, params: dict[str, str], last_id: str | None = None) -> AsyncIterator[tuple[str, Any]]:
        at = Position(params, last_id)
        while True:
            headers = {**self._headers, **at.request_headers()}
            try:
                async with aconnect_sse(
                    await self._http.get(), "GET", path, params=at.params, headers=headers, timeout=STREAM_TIMEOUT
                ) as source:
                    if not source.response.is_success:
                        await source.response.aread()
                        raise error_of(source.response, f"GET {path}")
                    async for event in source.aiter_sse():
                        if (data := at.took(event)) is None:
                            break
                        yield event.event, data
            except (httpx.TransportError, PoolUnavailableError) as error:
                at.broke(error, self._retries, self.base_url)
            await self._sleep(at.pause())
