"""What a person sees while the model loads, and once it is there.

Law: speaks on the console that it is given; on a terminal one moving line, elsewhere a line now and then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.status import Status

from polykv_proxy.engine.status import EngineStatus

_TICK_S = 0.2
_LINE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is told about a ready engine; None where it does not say."""

    model: str | None = None
    n_ctx_slot: int | None = None
    n_slots: int | None = None
    pools: str = "off"
    api_prefix: str = ""
    wants_key: bool = False
    warnings: Sequence[str] = ()


class StartupView:
    """Shows progress until `ready` or `failed` is called. `doing`, once set, says how far it is in place of the engine's state."""

    def __init__(self, status: Callable[[], EngineStatus], tail: Callable[[int], list[str]], console: Console) -> None:
        self._status = status
        self._tail = tail
        self.doing: Callable[[], str] | None = None
        self._console = console

    async def progress(self) -> None:
        """Show progress for ever; cancel it when the start is decided."""
        began = said = time.monotonic()
        if self._console.is_terminal:
            with self._console.status("starting the engine") as moving:
                await self._move(moving, began)
        while True:
            await asyncio.sleep(_TICK_S)
            if time.monotonic() - said >= _LINE_EVERY_S:
                said = time.monotonic()
                self._console.print(self._line(said - began), markup=False)

    async def _move(self, moving: Status, began: float) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            moving.update(self._line(time.monotonic() - began).replace("[", r"\["))

    def ready(self, url: str, facts: EngineFacts) -> None:
        """Say where it is and what it can do, and give one line to try."""
        show = self._console.print
        show(f"polykv-proxy is ready at {url}", markup=False)
        context = f", context {facts.n_ctx_slot} tokens per slot" if facts.n_ctx_slot else ""
        slots = f", {facts.n_slots} slots" if facts.n_slots else ""
        show(f"  model  {facts.model or 'unknown'}{context}{slots}", markup=False)
        show(f"  pools  {facts.pools}", markup=False)
        show(f"  page   {url}/polykv/ui", markup=False)
        for warning in facts.warnings:
            show(f"  note   {warning}", markup=False)
        show("  try    " + _try(url + facts.api_prefix, wants_key=facts.wants_key), markup=False)

    def note(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False)

    def failed(self, reason: str, lines: list[str]) -> None:
        """Say why, with the engine's last words."""
        self._console.print(f"error: {reason}", markup=False)
        for line in lines[-12:]:
            self._console.print(f"    {line}", markup=False)

    def _line(self, seconds: float) -> str:
        if self.doing is not None:
            return f"{self.doing()}, {seconds:.0f} s"
        status = self._status()
        memory = f", {_rss(status.pid) >> 20} MiB in memory" if status.pid else ""
        last = self._tail(1)
        said = f" | {last[0][:80]}" if last else ""
        reason = f" ({status.reason})" if status.reason else ""
        return f"engine {status.state.value}{reason}, {seconds:.0f} s{memory}{said}"


def _try(url: str, *, wants_key: bool) -> str:
    body = '{"messages":[{"role":"user","content":"Say hello."}],"max_tokens":32}'
    key = "-H 'Authorization: Bearer API_KEY' " if wants_key else ""
    return f"curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{body}'"


def _rss(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
