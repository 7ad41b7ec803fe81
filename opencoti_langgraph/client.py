"""`PoolClient`: every verb of the proxy, in plain Python, with or without LangChain.

Law: one call, one request; a repeatable call is sent again when its connection broke, nothing else is. Event streams are opened
again where they ended, for as long as the caller reads. One client may serve several threads.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import httpx
from httpx_sse import connect_sse

from opencoti_langgraph import calls
from opencoti_langgraph.calls import Call
from opencoti_langgraph.compacting import Refork, refork
from opencoti_langgraph.errors import OpencotiError, PoolUnavailableError, ProxyUnreachableError
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


def _verb(make: Callable[P, Call[T]]) -> Callable[Concatenate[PoolClient, P], T]:
    @functools.wraps(make)
    def send(client: PoolClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client.send(make(*args, **kwargs))

    return send


class PoolClient:
    """A client of one proxy.

    Args:
        base_url: Where it listens; an OpenAI base URL (`…/v1`) will do.
        api_key: The proxy's key, if it has one.
        timeout: For each request; by default only connecting is bounded, since making a pool takes as long as its prefill.
        retries: How often a repeatable call is sent again after its connection broke.
        http_client: An `httpx.Client` to use (its base URL counts); it stays open when this client is closed.
        sleep: How to wait, for tests.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: httpx.Timeout | float | None = TIMEOUT,
        retries: int = RETRIES,
        http_client: httpx.Client | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._headers = headers_of(api_key)
        self._http = http_client or httpx.Client(base_url=root_of(base_url), timeout=timeout)
        self._end = None if http_client else weakref.finalize(self, self._http.close)
        self._retries = retries
        self._sleep = sleep

    @property
    def base_url(self) -> str:
        """The proxy's address."""
        return str(self._http.base_url).rstrip("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; also done when nobody has the client any more."""
        if self._end is not None:
            self._end()

    def send(self, call: Call[T]) -> T:
        """Send one call. PoolApiError for an error answer, ProxyUnreachableError when nobody answers."""
        attempt = 0
        while True:
            try:
                reply = self._http.request(
                    call.method, call.path, json=call.json, params=call.params, headers={**self._headers, **call.headers}
                )
            except httpx.TransportError as error:
                if attempt >= (self._retries if call.repeatable else 0):
                    raise ProxyUnreachableError(unreachable(self.base_url, error)) from error
                self._sleep(pause_s(attempt))
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

    def compact_by_refork(self, old: PoolRef, *, release: bool = True, **new: Any) -> Refork:
        """Fork the pool above `old` (or `ancestor=`) with a rewritten prefix, then let `old` and all below it go.

        `new` is what `fork_pool` takes: `messages`, `prompt` or `compacted_tokens`, the full prefix, never a suffix. What is still
        in use, or not released here (`release=False`), goes by itself: its time to live is set to `grace_s` (60). With a `name` and
        `ancestor=` it may be called again after a crash, as nodes are: also when `old` is gone by then.
        """
        return self._steps(refork(old, new, release=release))

    def _steps(self, steps: Generator[Call[Any], Any, T]) -> T:
        call = next(steps)
        try:
            while True:
                try:
                    answer = self.send(call)
                except OpencotiError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as end:
            return cast("T", end.value)

    def watch_create(self, **body: Any) -> Iterator[Progress | Pool]:
        """Make a pool as `create_pool` does, telling how far it is; the last item is the pool."""
        return self._watch(calls.create_pool(**body))

    def watch_fork(self, pool: PoolRef, **body: Any) -> Iterator[Progress | Pool]:
        """Fork a pool as `fork_pool` does, telling how far it is; the last item is the pool."""
        return self._watch(calls.fork_pool(pool, **body))

    def tps(self, *, interval_ms: int | None = None, running: bool = False) -> Iterator[Tps]:
        """Speeds, live and without end; opened again whenever the connection breaks."""
        params = {**({"interval_ms": str(interval_ms)} if interval_ms else {}), **({"running": "1"} if running else {})}
        for _, data in self._events("/polykv/tps", params):
            yield Tps.model_validate(data)

    def events(self, *, topics: Sequence[str] | None = None, last_event_id: str | None = None) -> Iterator[Event]:
        """What happens, from now on or after `last_event_id`, over reconnections. After `resync` look at the listings."""
        for topic, data in self._events("/polykv/events", {"topics": ",".join(topics)} if topics else {}, last_event_id):
            yield Event.model_validate({**data, "topic": topic})

    def _watch(self, call: Call[Pool]) -> Iterator[Progress | Pool]:
        params = {**call.params, "stream": "1"}
        with connect_sse(
            self._http, call.method, call.path, json=call.json, params=params, headers={**self._headers, **call.headers}
        ) as source:
            if not source.response.is_success:
                source.response.read()
                raise error_of(source.response, f"{call.method} {call.path}")
            for event in source.iter_sse():
                if event.event == "error":
                    raise error_in_stream(event.json(), call.path)
                if event.event == "done":
                    yield call.read(event.json().get("pool", event.json()))
                    return
                yield Progress.model_validate(event.json())
        raise ProxyUnreachableError(f"{self.base_url}{call.path}: the stream ended before the pool was made")

    def _events(self, path: str, params: dict[str, str], last_id: str | None = None) -> Iterator[tuple[str, Any]]:
        at = Position(params, last_id)
        while True:
            headers = {**self._headers, **at.request_headers()}
            try:
                with connect_sse(self._http, "GET", path, params=at.params, headers=headers, timeout=STREAM_TIMEOUT) as source:
                    if not source.response.is_success:
                        source.response.read()
                        raise error_of(source.response, f"GET {path}")
                    for event in source.iter_sse():
                        if (data := at.took(event)) is None:
                            break
                        yield event.event, data
            except (httpx.TransportError, PoolUnavailableError) as error:
                at.broke(error, self._retries, self.base_url)
            self._sleep(at.pause())
