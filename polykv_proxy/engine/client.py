"""The engine's verbs, one method each (docs/engine-protocol.md).

Law: sends and parses, decides nothing. Control calls and long streams have connection pools of their own, so that neither starves
the other. Raises only EngineError and its kinds; a cancelled stream closes its connection, which cancels the work in the engine.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import httpx2
import numpy as np
import pydantic

from polykv_proxy.core.pools import SeqRef
from polykv_proxy.core.prefix import Tokens, as_tokens, from_bytes
from polykv_proxy.engine import stock_wire, wire
from polykv_proxy.engine.samples import Ask, Sample
from polykv_proxy.errors import EngineAbilityError, EngineError, EngineRefusedError, EngineUnavailableError
from polykv_proxy.ports import EngineAddress, Header

ROOT = "/_polykv/v1"
CONTROL_TIMEOUT = httpx2.Timeout(30.0, connect=5.0)
DRY_TIMEOUT = httpx2.Timeout(300.0, connect=5.0)
FILE_TIMEOUT = httpx2.Timeout(None, connect=5.0)
STREAM_TIMEOUT = httpx2.Timeout(30.0, connect=5.0, read=None)
KEEPALIVE_S = 4.0
"""Shorter than the engine's own 5 s, so that an idle connection is never used while the engine closes it."""

MakeStep: TypeAlias = wire.Progress | wire.Made
Parsed = TypeVar("Parsed", bound=pydantic.BaseModel)


class EngineClient:
    """One engine at one address, with the key of its boot. `api_key` and `api_prefix` are the engine's own, where it has them."""

    def __init__(
        self,
        address: EngineAddress,
        key: str,
        *,
        api_key: str | None = None,
        api_prefix: str = "",
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.key = key
        self.api_prefix = api_prefix
        self._root = api_prefix + ROOT
        base = "http://engine" if address.uds else f"http://{address.host}:{address.port}"
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in address.headers]
        headers.append(("x-polykv-key", key))
        if api_key:
            headers.append(("authorization", f"Bearer {api_key}"))

        def pool(n: int, timeout: httpx2.Timeout) -> httpx2.AsyncClient:
            limits = httpx2.Limits(max_connections=n, max_keepalive_connections=4, keepalive_expiry=KEEPALIVE_S)
            # there is no TLS to an engine, so no certificates are loaded
            way = transport or httpx2.AsyncHTTPTransport(uds=address.uds, limits=limits, trust_env=False, verify=False)
            return httpx2.AsyncClient(transport=way, base_url=base, headers=headers, timeout=timeout, trust_env=False)

        self._control = pool(16, CONTROL_TIMEOUT)
        self._streams = pool(128, STREAM_TIMEOUT)

    async def close(self) -> None:
        """Close all connections."""
        await self._control.aclose()
        await self._streams.aclose()

    async def hello(self) -> wire.Hello:
        """What the engine is. EngineAbilityError: it has no verbs, or another major version."""
        try:
            hello = await self._get_json("hello", wire.Hello)
        except EngineRefusedError as refused:
            if refused.status == 503:
                raise EngineUnavailableError(f"the engine is not ready: {refused.message}") from refused
            if refused.status == 401:
                message = f"the engine refuses the API key of this proxy (hello: 401 {refused.message})"
                raise EngineAbilityError(message, "give --api-key a key that the engine takes") from refused
            if refused.status in {403, 404, 501}:
                raise EngineAbilityError(
                    f"this engine does not speak the pool protocol (hello: {refused.status} {refused.message})"
                ) from refused
            raise
        if hello.protocol.major != wire.PROTOCOL_MAJOR:
            raise EngineAbilityError(
                f"this engine speaks version {hello.protocol.major} of the pool protocol, this proxy version {wire.PROTOCOL_MAJOR}",
                "use an engine and a proxy of one release",
            )
        return hello

    async def state(self) -> wire.State:
        """The published snapshot."""
        return await self._get_json("state", wire.State)

    async def seq_tokens(self, seq: SeqRef) -> Tokens:
        """Token ids of a sequence."""
        return from_bytes((await self._call("GET", f"{self._root}/seqs/{seq}/tokens")).content)

    async def free_seq(self, seq: SeqRef) -> bool:
        """Give a sequence back; False when it was gone already."""
        return _parse(wire.Freed, (await self._call("DELETE", f"{self._root}/seqs/{seq}")).content).freed

    async def end_session(self, number: int) -> wire.SessionEnded:
        """Cancel a session's requests and free its cells."""
        return _parse(wire.SessionEnded, (await self._call("DELETE", f"{self._root}/sessions/{number}")).content)

    async def dry_run(self, target: str, body: bytes, headers: Sequence[Header] = ()) -> list[Tokens]:
        """The token ids that each task of a request on a generating route would prefill."""
        sent = [(name, value) for name, value in headers if not name.lower().startswith(b"x-polykv-")]
        if not any(name.lower() == b"content-type" for name, _ in sent):
            sent.append((b"content-type", b"application/json"))
        sent.append((b"x-polykv-dry", b"tokens"))
        response = await self._call("POST", target, content=body, headers=sent, timeout=DRY_TIMEOUT)
        return split_counted(response.content)

    async def detokenize(self, tokens: Tokens) -> str:
        """The text of token ids, by the engine's own vocabulary."""
        response = await self._call("POST", f"{self.api_prefix}/detokenize", json={"tokens": tokens.tolist()})
        return _parse(stock_wire.Text, response.content).content

    async def sample(self, ask: Ask) -> Sample:
        """Run a prompt of our own. Without a time limit; cancelled, the engine stops."""
        url = f"{self.api_prefix}/completion"
        return Sample.of(await self._call("POST", url, client=self._streams, json=ask.body(), headers=ask.headers()))

    async def slots(self, patience_s: float) -> list[stock_wire.PublicSlot]:
        """The engine's own `/slots`: which waits for the work at hand. EngineAbilityError: its form is unknown."""
        timeout = httpx2.Timeout(patience_s, connect=5.0)
        raw = (await self._call("GET", f"{self.api_prefix}/slots", timeout=timeout)).content
        try:
            return stock_wire.PUBLIC_SLOTS.validate_json(raw)
        except ValueError as error:
            raise EngineAbilityError(f"its /slots is not of a known form: {error}".splitlines()[0]) from error

    async def metrics(self) -> stock_wire.MetricsReply:
        """The engine's own `/metrics`."""
        response = await self._call("GET", f"{self.api_prefix}/metrics")
        return stock_wire.MetricsReply(response.content, response.headers.get("process-start-time-unix"))

    async def model_id(self) -> str | None:
        """The name by which clients ask for the model, by the engine's own `/v1/models`; None when it does not say."""
        listed = _object((await self._call("GET", f"{self.api_prefix}/v1/models")).content).get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        name = first.get("id") if isinstance(first, dict) else None
        return name if isinstance(name, str) and name else None

    async def make_seq(self, body: Mapping[str, object]) -> AsyncGenerator[MakeStep, None]:
        """Materialise or snapshot: progress, then exactly one `Made`. Closing the iterator cancels it in the engine."""
        made = False
        async with self._events("POST", f"{self._root}/seqs", json=dict(body)) as source:
            async for event in _iterate(source):
                step = _make_step(event)
                if step is not None:
                    yield step
                if isinstance(step, wire.Made):
                    made = True
                    break
        if not made:
            raise EngineError("the engine ended a materialisation without a result")

    async def set_expendable(self, seqs: Sequence[SeqRef]) -> None:
        """What the engine may give up when cells run out, in this order; takes the place of the list before."""
        await self._call("POST", f"{self._root}/expendable", json={"seqs": [str(seq) for seq in seqs]})

    async def set_gpu_weight(self, weight: float) -> wire.GpuShare:
        """The engine's weight among those that share its device, from the next look of each of them on."""
        return _parse(wire.GpuShare, (await self._call("POST", f"{self._root}/gpu", json={"weight": weight})).content)

    async def save_seq(self, seq: SeqRef, path: Path, start: int) -> None:
        """Write the KV of `[start, L)` to a file, whole or not at all. `path` is absolute and the engine's. No time limit."""
        await self._call("POST", f"{self._root}/seqs/{seq}/save", json={"path": str(path), "from": start}, timeout=FILE_TIMEOUT)

    async def restore_seq(self, path: Path, parent: SeqRef | None) -> wire.Made:
        """Make a sequence of such a file; with a `start` above 0 the parent gives the tokens before it. No time limit."""
        body = {"path": str(path)} if parent is None else {"path": str(path), "parent_seq": str(parent)}
        return _parse(wire.Made, (await self._call("POST", f"{self._root}/seqs/restore", json=body, timeout=FILE_TIMEOUT)).content)

    @asynccontextmanager
    async def event_stream(
        self, last_event_id: str | None, *, interval_ms: int | None = None
    ) -> AsyncIterator[AsyncIterator[httpx2.ServerSentEvent]]:
        """The engine's raw event stream, resumed after `last_event_id`. `interval_ms`: of counters, 0 for none."""
        headers = {"last-event-id": last_event_id} if last_event_id else {}
        params = {} if interval_ms is None else {"interval_ms": interval_ms}
        timeout = httpx2.Timeout(30.0, connect=5.0)
        async with self._events("GET", f"{self._root}/events", headers=headers, params=params, timeout=timeout) as source:
            yield _iterate(source)

    async def _get_json(self, verb: str, model: type[Parsed]) -> Parsed:
        return _parse(model, (await self._call("GET", f"{self._root}/{verb}")).content)

    async def _call(self, method: str, url: str, *, client: httpx2.AsyncClient | None = None, **options: Any) -> httpx2.Response:
        try:
            response = await (client or self._control).request(method, url, **options)
        except httpx2.HTTPError as error:
            raise _away(error) from error
        if response.status_code >= 400:
            raise refused(response.status_code, response.content)
        return response

    @asynccontextmanager
    async def _events(self, method: str, url: str, **options: Any) -> AsyncIterator[httpx2.EventSource]:
        try:
            async with self._streams.sse(url, method=method, max_event_size=None, **options) as source:
                if source.response.status_code >= 400:
                    raise refused(source.response.status_code, await source.response.aread())
                yield source
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise _away(error) from error


async def _iterate(source: httpx2.EventSource) -> AsyncIterator[httpx2.ServerSentEvent]:
    try:
        async for event in source:
            yield event
    except httpx2.SSEError as error:
        raise EngineError(f"the engine did not answer an event stream: {error}") from error


def _make_step(event: httpx2.ServerSentEvent) -> MakeStep | None:
    if event.event == "progress":
        return _parse(wire.Progress, event.data.encode())
    if event.event == "done":
        return _parse(wire.Made, event.data.encode())
    if event.event == "error":
        fields = _object(event.data.encode())
        raise EngineRefusedError(
            int(fields.get("status", 500)), str(fields.get("type", "")), str(fields.get("message", "")), fields.get("param")
        )
    return None


def refused(status: int, body: bytes) -> EngineRefusedError:
    """An error answer of the engine as an exception; its body may be anything."""
    error = _object(body).get("error")
    fields = error if isinstance(error, dict) else {}
    message = fields.get("message") or body[:200].decode("utf-8", "replace") or f"status {status}"
    return EngineRefusedError(status, str(fields.get("type", "")), str(message), fields.get("param"))


def split_counted(raw: bytes) -> list[Tokens]:
    """Per task `u32 n`, then `n` int32, little-endian. EngineError when the lengths do not add up."""
    words = np.frombuffer(raw[: len(raw) - len(raw) % 4], dtype="<i4")
    found, at = [], 0
    while at < words.size:
        n = int(words[at]) & 0xFFFFFFFF
        if at + 1 + n > words.size:
            break
        found.append(as_tokens(words[at + 1 : at + 1 + n]))
        at += 1 + n
    if at != words.size or len(raw) % 4:
        raise EngineError("the engine's token list is cut short")
    return found


def _parse(model: type[Parsed], raw: bytes) -> Parsed:
    try:
        return model.model_validate_json(raw)
    except (pydantic.ValidationError, ValueError) as error:
        raise EngineError(f"the engine sent a {model.__name__} that does not follow the protocol: {error}") from error


def _object(raw: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(raw)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _away(error: Exception) -> EngineUnavailableError:
    return EngineUnavailableError(f"the engine does not answer: {type(error).__name__} {error}".rstrip())
