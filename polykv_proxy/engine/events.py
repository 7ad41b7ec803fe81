"""The engine's event stream as values, resumable.

Law: yields what came, in order, and remembers the last id; when to connect again is the caller's business.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

import pydantic

from polykv_proxy.core.events import SeqGivenUp, SlotEvent, SlotEventKind
from polykv_proxy.core.pools import SeqRef
from polykv_proxy.engine import wire
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.errors import EngineError


@dataclass(frozen=True, slots=True)
class Greeting:
    """First event of each connection: who is talking."""

    boot_id: str


@dataclass(frozen=True, slots=True)
class Resync:
    """Events were missed: read `state`."""

    boot_id: str


StreamEvent: TypeAlias = Greeting | Resync | SlotEvent | SeqGivenUp | wire.Counters
_SLOT_EVENTS = frozenset(kind.value for kind in SlotEventKind)


class EngineEvents:
    """One reader of the stream. Each `listen` is one connection, resumed where the last one ended."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._last_id: str | None = None

    def forget(self) -> None:
        """Start the next connection from now."""
        self._last_id = None

    async def listen(self) -> AsyncIterator[StreamEvent]:
        """Events until the connection ends. Raises EngineError when it breaks."""
        async with self._client.event_stream(self._last_id) as stream:
            async for raw in stream:
                event = _parse(raw.event, raw.data)
                if raw.id:
                    self._last_id = raw.id
                if event is not None:
                    yield event


def _parse(kind: str, data: str) -> StreamEvent | None:
    try:
        if kind == "hello":
            return Greeting(wire.BootNotice.model_validate_json(data).boot_id)
        if kind == "resync":
            return Resync(wire.BootNotice.model_validate_json(data).boot_id)
        if kind == "counters":
            return wire.Counters.model_validate_json(data)
        if kind == "evicted":
            return SeqGivenUp(SeqRef.parse(wire.EvictedNotice.model_validate_json(data).seq))
        if kind in _SLOT_EVENTS:
            return wire.SlotEventWire.model_validate_json(data).value()
    except (pydantic.ValidationError, ValueError) as error:
        raise EngineError(f"the engine sent an event that does not follow the protocol: {error}") from error
    return None
