"""One look at a pool: does it answer as a computation without it does?

Law: looks, and changes nothing. What is wrong is said in a sentence; what cannot be seen is an error, never a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping

from polykv_proxy.core.pools import Pool, SeqRef
from polykv_proxy.core.verification import LEAST, Judgement, LogProbs, growing, judge, long_prompt, shrinking
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.room import Room
from polykv_proxy.runtime.sampler import Sampler


class Look:
    """One pool, the places to look at, and what was computed without it. `seq` is the sequence that was looked at last."""

    def __init__(self, hub: Hub, room: Room, pool: Pool, seq: SeqRef, positions: tuple[int, ...]) -> None:
        self._hub = hub
        self._pool = pool
        self.seq = seq
        self._positions = positions
        engine = hub.require_engine()
        self._exact = engine.prefix_sharing == "any"
        self._quantised = engine.model.quantised
        prompt = long_prompt(pool.tokens)
        self.sampler = Sampler(hub, room, prompt, pool.prefix_len, exact=self._exact)
        self._references: list[Mapping[int, LogProbs]] = []
        self.judgement = Judgement({}, LEAST)

    async def suspect(self) -> str | None:
        """What is wrong with it, in a sentence. A second computation without the pool decides what the first one left in doubt."""
        if not await self._same_tokens():
            return "the engine holds other tokens than the pool's"
        pooled = await self.sampler.pooled(self.seq, self._positions)
        self._positions = positions = tuple(sorted(pooled))
        first = shrinking(positions, self._pool.n_shared) if self._exact else growing(positions)
        self._references.append(await self.sampler.fresh(first))
        if self._judged(pooled) is not None:
            self._references.append(await self.sampler.fresh(growing(positions, halves=not self._exact)))
        return self._judged(pooled)

    async def again(self, seq: SeqRef) -> bool:
        """Is it still wrong, now that its KV is that of this sequence?"""
        self.seq = seq
        if not await self._same_tokens():
            return True
        return bool(self._references) and self._judged(await self.sampler.pooled(seq, self._positions)) is not None

    @property
    def n_doubted(self) -> int:
        """How many of its cells the first wrong answer looked at."""
        first_bad = self.judgement.first_bad
        return self._pool.prefix_len if first_bad is None else min(first_bad - 1, self._pool.prefix_len)

    async def _same_tokens(self) -> bool:
        held = await self._hub.client.seq_tokens(self.seq)
        return held.size == self._pool.tokens.size and bool((held == self._pool.tokens).all())

    def _judged(self, pooled: Mapping[int, LogProbs]) -> str | None:
        self.judgement = judged = judge(pooled, self._references, quantised=self._quantised)
        if judged.first_bad is None:
            return None
        far = f"log-probs differ by {judged.max_abs_diff:.3g}, tolerance {judged.tolerance:.3g}"
        return f"{far}, first at position {judged.first_bad}"
