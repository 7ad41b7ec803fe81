"""A short probe: how long the engine's steps are with so many decoders, contexts and prompt tokens.

Law: times are those of arrivals at a client; only stretches in which all streams decode are samples.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from statistics import median

from bench.kit.rig import GREEDY, tokens
from bench.kit.wire import Exchange, Wire
from bench.sim.engine import Sample

STREAMS = (1, 2, 3, 4, 6, 8)
SHORT_STREAMS = (1, 2, 4, 8)
PROMPTS = (32, 64, 128)
ROUNDS = 3
SHORT, LONG = 16, 400
"""Tokens of context; the longer one is in a pool, so that it costs the probe nothing."""


class NeverTogetherError(RuntimeError):
    """No moment in which all streams decoded."""

    def __init__(self) -> None:
        super().__init__("the streams of a probe never ran side by side; give it more --probe-s")


@dataclass
class Prober:
    """Measures at one proxy. `seconds` of decoding are aimed at for each sample, in three parts at different times."""

    url: str
    pool: list[int]
    pool_id: int
    seconds: float

    def __post_init__(self) -> None:
        self._wire = Wire(self.url)
        self._seeds = count(1)
        self.solo_tps = 0.0

    def samples(self) -> list[Sample]:
        """Streams on the pool and without it, and prompts alone: the median of three rounds over all. Sets `solo_tps`."""
        self.alone()
        self.solo_tps = self.alone()
        cases = [(n, LONG) for n in STREAMS] + [(n, SHORT) for n in SHORT_STREAMS]
        rounds = [[self._together(*case) for case in cases] + [self._prompt(n) for n in PROMPTS] for _ in range(ROUNDS)]
        samples = [replace(one[0], step_s=median(sample.step_s for sample in one)) for one in zip(*rounds, strict=True)]
        self.solo_tps = 1 / samples[0].step_s
        return samples

    def alone(self, n_least: int = 48) -> float:
        """Tokens per second of one stream on the pool."""
        return 1 / self._decoded([self._stream(LONG, max(n_least, round(self.seconds * self.solo_tps)))])[0]

    def _together(self, n: int, n_context: int) -> Sample:
        n_answer = max(16, round(self.seconds * self.solo_tps / n / ROUNDS))
        for n_longer in (n_answer, 2 * n_answer, 4 * n_answer):
            with ThreadPoolExecutor(n) as threads, suppress(NeverTogetherError):
                step_s, n_tokens = self._decoded(list(threads.map(self._stream, [n_context] * n, [n_longer] * n)))
                return Sample(step_s, n, n * (n_context + 8 + n_tokens / n / 2))
        raise NeverTogetherError

    def _prompt(self, n: int) -> Sample:
        """By the engine's own clock."""
        done = self._post(tokens(n, 1000 + next(self._seeds)), 1)
        return Sample(done.events[-1]["timings"]["prompt_ms"] / 1e3, 0, 0, n)

    def _stream(self, n_context: int, n_answer: int) -> Exchange:
        seed = next(self._seeds)
        if n_context == LONG:
            return self._post([*self.pool, *tokens(8, seed)], n_answer, pool_id=self.pool_id)
        return self._post(tokens(n_context, seed), n_answer)

    def _post(self, prompt: list[int], n_answer: int, **more: object) -> Exchange:
        body = {"prompt": prompt, "n_predict": n_answer, "stream": True, "cache_prompt": "pool_id" in more}
        return self._wire.post("/completion", {**body, **GREEDY, **more})

    def _decoded(self, streams: list[Exchange]) -> tuple[float, float]:
        """Seconds of a step while all decoded, and the tokens that came in that time. Each stream gets one a step."""
        times = [[done.began + at for at in done.arrivals[:-1]] for done in streams]  # the last one only says that it is over
        begin, end = max(line[0] for line in times), min(line[-1] for line in times)
        if end <= begin:
            raise NeverTogetherError
        n_tokens = sum(begin < at <= end for line in times for at in line)
        return (end - begin) * len(times) / n_tokens, n_tokens
