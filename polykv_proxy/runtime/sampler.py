"""Log-probs of a prefix at chosen positions, once from its pool and once computed without it.

Law: what a sample was made from is proved by what the engine says of it, never assumed; else there is no sample. Work of ours runs
in sessions of its own, which are over, and their cells free, when the method returns, whatever ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager

from polykv_proxy.core.commands import EndSession
from polykv_proxy.core.pools import SeqRef
from polykv_proxy.core.prefix import Tokens
from polykv_proxy.core.verification import N_ASKED, LogProbs, Step, expected_cached
from polykv_proxy.engine.samples import Ask, Sample
from polykv_proxy.runtime.hub import Hub
from polykv_proxy.runtime.room import Room


class UnprovenError(Exception):
    """There is no saying what an answer was computed from. The message says why, for the caller of the check."""


class Sampler:
    """Samples for one check of one pool. `prompt` begins with the prefix, whose length is `prefix_len`.

    `exact`: the engine shares any part of a sequence, not only all of it or a state that it keeps.
    """

    def __init__(self, hub: Hub, room: Room, prompt: Tokens, prefix_len: int, *, exact: bool) -> None:
        self._hub = hub
        self._room = room
        self._prompt = prompt
        self._prefix_len = prefix_len
        self._exact = exact
        self.n_computed = 0

    async def fresh(self, steps: Iterable[Step]) -> dict[int, LogProbs]:
        """Computed without any pool, and without what any slot held before."""
        found: dict[int, LogProbs] = {}
        held = 0
        async with self._session() as session:
            for step in steps:
                growth = step.n_prompt - held
                if growth > 1 and not await self._room.has(growth):
                    raise UnprovenError("no room: a check needs as many free or idle cells as the prefix has tokens, and some more")
                sample = await self._ask(step.n_prompt, session, reuse=held > 0)
                if sample.n_shared or sample.n_cached != expected_cached(step, held):
                    raise UnprovenError("what was computed without the pool was pushed out of its slot; try again in quieter times")
                held = step.n_prompt
                if step.compared:
                    found[held] = _given(sample)
        return found

    async def pooled(self, seq: SeqRef, positions: Sequence[int]) -> dict[int, LogProbs]:
        """Computed on the sequence. Positions for which this engine shares nothing of it are left out."""
        found: dict[int, LogProbs] = {}
        for position in positions:
            sample = await self._on(seq, position)
            if sample is not None:
                found[position] = _given(sample)
        if not found:
            raise UnprovenError("the pool was not used: its memory cannot be cut back to any of these positions")
        return found

    async def _on(self, seq: SeqRef, position: int) -> Sample | None:
        """The last token of the prompt is computed alone, on cells of the sequence as far as they go.

        1. past the end: all of the sequence, then token by token; 2. within: what lies before that token; 3. within, where memory
        cannot be cut back: from a state before that.
        """
        shared = min(position - 1, self._prefix_len)
        lengths = list(range(shared + 1, position + 1))
        whole = self._exact or position > self._prefix_len
        if not whole and position > 2:
            lengths, shared = [position - 1, position], position - 2
        first, last = await self._attached(seq, lengths, shared)
        if last.n_cached == position - 1 and (last.n_shared == shared or (last.n_shared and not whole)):
            return last
        if not whole and first.miss == "memory_class":
            return None
        raise UnprovenError(f"the pool was not used: {first.miss or f'only {last.n_shared} of {shared} tokens of it'}")

    async def _attached(self, seq: SeqRef, lengths: Sequence[int], shared: int) -> tuple[Sample, Sample]:
        """Prompts that grow in one slot: the first and the last sample. A slot that held the same tokens by itself is empty after
        the first try, and another one is taken.
        """
        for _ in range(2):
            async with self._session() as session:
                samples = [await self._ask(n, session, seq=seq, max_shared=shared) for n in lengths]
            if samples[0].miss != "own_cache_longer":
                break
        return samples[0], samples[-1]

    async def _ask(self, n: int, session: int, *, reuse: bool = True, seq: SeqRef | None = None, max_shared: int = 0) -> Sample:
        req = self._hub.ledger.take_req()
        ask = Ask(self._prompt[:n], req, session, reuse=reuse, seq=seq, max_shared=max_shared, n_probs=N_ASKED)
        sample = await self._hub.client.sample(ask)
        self.n_computed += n - sample.n_cached
        return sample

    @asynccontextmanager
    async def _session(self) -> AsyncGenerator[int, None]:
        session = self._hub.ledger.sessions.take_own()
        try:
            yield session
        finally:
            await asyncio.shield(self._hub.spawn(self._hub.run([EndSession(session)])))


def _given(sample: Sample) -> LogProbs:
    if not sample.log_probs:
        raise UnprovenError("the engine gives no log-probs")
    return sample.log_probs
