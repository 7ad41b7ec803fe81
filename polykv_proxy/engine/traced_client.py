"""The engine's verbs with a span each: what pools cost, under the request that made them necessary.

Law: adds spans and nothing else. Made only where traces are wanted (`--otel`); imports what the extra `otel` brings.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from opentelemetry.trace import SpanKind, Tracer

from polykv_proxy.core.pools import SeqRef
from polykv_proxy.core.prefix import Tokens
from polykv_proxy.engine import wire
from polykv_proxy.engine.client import EngineClient, MakeStep
from polykv_proxy.engine.samples import Ask, Sample
from polykv_proxy.ports import Header


class TracedClient(EngineClient):
    """An engine client whose work on pools is seen. What is asked all the time (state, events, pages) is not."""

    def __init__(self, tracer: Tracer, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tracer = tracer

    async def make_seq(self, body: Mapping[str, object]) -> AsyncGenerator[MakeStep, None]:
        """Its span ends with the last step that is taken."""
        with self._tracer.start_as_current_span("engine make_seq", kind=SpanKind.CLIENT) as span:
            async with aclosing(super().make_seq(body)) as steps:
                async for step in steps:
                    if isinstance(step, wire.Made):
                        span.set_attribute("polykv.seq", str(step.ref))
                        span.set_attribute("polykv.n_tokens", step.n_tokens)
                        span.set_attribute("polykv.n_shared", step.n_shared)
                    yield step

    async def restore_seq(self, path: Path, parent: SeqRef | None) -> wire.Made:
        """With the sequence that came of it."""
        with self._tracer.start_as_current_span("engine restore_seq", kind=SpanKind.CLIENT) as span:
            made = await super().restore_seq(path, parent)
            span.set_attribute("polykv.seq", str(made.ref))
            return made

    async def save_seq(self, seq: SeqRef, path: Path, start: int) -> None:
        """With the sequence."""
        with self._tracer.start_as_current_span("engine save_seq", kind=SpanKind.CLIENT, attributes={"polykv.seq": str(seq)}):
            await super().save_seq(seq, path, start)

    async def free_seq(self, seq: SeqRef) -> bool:
        """With the sequence."""
        with self._tracer.start_as_current_span("engine free_seq", kind=SpanKind.CLIENT, attributes={"polykv.seq": str(seq)}):
            return await super().free_seq(seq)

    async def dry_run(self, target: str, body: bytes, headers: Sequence[Header] = ()) -> list[Tokens]:
        """With how many prompts there are."""
        with self._tracer.start_as_current_span("engine dry_run", kind=SpanKind.CLIENT) as span:
            prompts = await super().dry_run(target, body, headers)
            span.set_attribute("polykv.n_prompts", len(prompts))
            return prompts

    async def sample(self, ask: Ask) -> Sample:
        """A prompt of our own."""
        with self._tracer.start_as_current_span("engine sample", kind=SpanKind.CLIENT):
            return await super().sample(ask)
