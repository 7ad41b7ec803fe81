"""What the engine's own routes answer, as far as we ask them: `/metrics`, `/slots`, `/detokenize`, `/completion`.

Law: that of wire.py; but no version says what comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field, TypeAdapter

from polykv_proxy.engine.wire import Wire


@dataclass(frozen=True, slots=True)
class MetricsReply:
    """`/metrics` as it came, and since when the engine counts (Unix seconds), if it says so."""

    body: bytes
    started: str | None = None


class Text(Wire):
    """`POST /detokenize`."""

    content: str


class Candidate(Wire):
    """One candidate for the next token; null where its logit is not a number."""

    id: int
    logprob: float | None = None


class TokenProbs(Wire):
    """What could have come at one place."""

    top_logprobs: list[Candidate] = Field(default_factory=list)


class Completion(Wire):
    """`POST /completion` with `n_probs`."""

    completion_probabilities: list[TokenProbs] = Field(default_factory=list)

    def first(self) -> Mapping[int, float]:
        """Candidates for the first new token, with their log-probabilities; empty when the engine gave none."""
        found = self.completion_probabilities[0].top_logprobs if self.completion_probabilities else []
        return {one.id: math.nan if one.logprob is None else one.logprob for one in found}


class NextToken(Wire):
    """The decoding of a public slot."""

    n_decoded: int | None = None


class PublicSlot(Wire):
    """One slot of `GET /slots`."""

    id: int
    is_processing: bool = False
    id_task: int = -1
    n_prompt_tokens_processed: int | None = None
    next_token: list[NextToken] = Field(default_factory=list)

    def work(self) -> tuple[object, ...] | None:
        """What is another value whenever the slot has done something; None for a working one that has no counters."""
        n_decoded = tuple(token.n_decoded for token in self.next_token)
        if self.is_processing and (self.n_prompt_tokens_processed is None or None in (n_decoded or (None,))):
            return None
        return self.id, self.is_processing, self.id_task, self.n_prompt_tokens_processed, n_decoded


PUBLIC_SLOTS = TypeAdapter(list[PublicSlot])
