"""The metrics page: made ahead for those who ask often, of this moment for the others.

Law: an answer never waits for the engine beyond a few milliseconds, and none is older than `FRESH_S`. Nobody asks, nothing is made.
Who asks seldom finds on it what he did a moment ago, unless the engine is too busy to say.
Where a page takes long to make (thousands of sessions) it may be older: making it takes at most a fifth of the time of the loop.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable, Iterable
from functools import cached_property

from prometheus_client.metrics_core import Metric

from polykv_proxy.observability.engine_page import EnginePage
from polykv_proxy.observability.engine_source import EngineSource
from polykv_proxy.observability.exposition import Form, parts

TICK_S = 0.1
FRESH_S = 0.2
RECENT_S = 1.0
"""Who has asked within this time will most likely ask again soon."""
PATIENCE_S = 0.005
"""An idle engine answers in a millisecond; a busy one when it gets to it."""
SELDOM_PATIENCE_S = 0.05
"""Of one who asks seldom: most engines get to it between two steps, and what he would get else is as old as his last question."""
SHARE = 5
_EMPTY = EnginePage()


class Rendered:
    """One page. `made_at` is the moment of which it speaks; `whole`: the engine's part is in; `started`: since when that counts."""

    def __init__(self, body: bytes, made_at: float, *, whole: bool, started: str | None) -> None:
        self.body, self.made_at, self.whole, self.started = body, made_at, whole, started

    @cached_property
    def compressed(self) -> bytes:
        """For those who take gzip."""
        return gzip.compress(self.body, compresslevel=1)


class MetricsPage:
    """The page over one engine's source and our families, of which `collect` gives those of this moment."""

    def __init__(
        self, source: EngineSource, collect: Callable[[], Iterable[Metric]], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._source, self._collect, self._now = source, collect, now
        self._asked_at: dict[Form, float] = {}
        self._made: dict[Form, Rendered] = {}
        self._asked = asyncio.Event()
        self._took_s = 0.0

    async def read(self, form: Form) -> Rendered:
        """The page as it is now; for those who ask often, as it was a moment ago."""
        now = self._now()
        often = any(now - at <= RECENT_S for at in self._asked_at.values())
        self._asked_at[form] = now
        self._asked.set()
        fresh_s, patience_s = (FRESH_S, PATIENCE_S) if often else (0.0, SELDOM_PATIENCE_S)
        age_s = self._source.age_s
        if age_s is None or not often or age_s > fresh_s:
            self._source.refresh()
            await self._source.refreshed(patience_s)
        made = self._made.get(form)
        if made is None or self._is_old(made, fresh_s):
            made = await self._make(form, gently=False)
        return made

    def _is_old(self, made: Rendered, fresh_s: float) -> bool:
        """By its age, or because the engine has answered since."""
        limit_s = max(fresh_s, SHARE * self._took_s)
        return self._now() - made.made_at > limit_s or (not made.whole and self._source.page is not None)

    async def run(self) -> None:
        """Make pages ahead, for as long as somebody asks."""
        while True:
            await self._asked.wait()
            await asyncio.sleep(max(TICK_S, SHARE * self._took_s))
            recent = [form for form, at in self._asked_at.items() if self._now() - at <= RECENT_S]
            if not recent:
                self._asked.clear()
                continue
            self._source.refresh()
            for form in recent:
                await self._make(form, gently=True)

    async def _make(self, form: Form, *, gently: bool) -> Rendered:
        """`gently`: others may run in between."""
        began_at = since = self._now()
        engine, took_s, made = self._source.page, 0.0, []
        for part in parts(form, engine or _EMPTY, self._collect()):
            made.append(part)
            took_s += self._now() - since
            if gently:
                await asyncio.sleep(0)
            since = self._now()
        self._took_s = took_s
        whole = engine is not None
        rendered = Rendered(b"".join(made), began_at, whole=whole, started=self._source.started if whole else None)
        before = self._made.get(form)
        if before is None or before.made_at <= began_at:
            self._made[form] = rendered
        return rendered
