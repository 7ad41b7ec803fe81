"""Prompts of our own on the engine's completion route: what is asked, and what comes back.

Law: values and their form on the wire; sending is the client's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx2

from polykv_proxy.core.pools import SeqRef
from polykv_proxy.core.prefix import Tokens
from polykv_proxy.engine.stock_wire import Completion
from polykv_proxy.errors import EngineError


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, of which one token is generated. `reuse`: tokens that its slot holds may be kept, and tokens of `seq` taken, at
    most `max_shared`. `slot`: the one that it must run in, as soon as that one is free. `n_probs`: candidates to be named.
    """

    prompt: Tokens
    req: int
    session: int
    reuse: bool = True
    seq: SeqRef | None = None
    max_shared: int = 0
    slot: int | None = None
    n_probs: int = 0

    def body(self) -> dict[str, object]:
        """The request's body."""
        place = {} if self.slot is None else {"id_slot": self.slot}
        asked = {"n_predict": 1, "temperature": 0, "n_probs": self.n_probs, "cache_prompt": self.reuse}
        return {"prompt": self.prompt.tolist(), **asked, **place}

    def headers(self) -> dict[str, str]:
        """The request's headers."""
        attach = {} if self.seq is None else {"x-polykv-seq": str(self.seq), "x-polykv-shared": str(self.max_shared)}
        return {"x-polykv-req": str(self.req), "x-polykv-session": str(self.session), **attach}


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of it: tokens not computed, tokens taken from the sequence, why none, and the best candidates for the next."""

    n_cached: int
    n_shared: int
    miss: str | None
    log_probs: Mapping[int, float]

    @classmethod
    def of(cls, response: httpx2.Response) -> Sample:
        """From a reply of status 200. EngineError when it does not follow the protocol."""
        said = [response.headers.get(f"x-polykv-{name}", "") for name in ("cached", "shared")]
        if not all(value.isdecimal() for value in said):
            raise EngineError("the engine does not say how much of a request of ours it computed")
        try:
            log_probs = Completion.model_validate_json(response.content).first()
        except ValueError as error:
            raise EngineError(f"the engine sent a completion of an unknown form: {error}".splitlines()[0]) from error
        return cls(int(said[0]), int(said[1]), response.headers.get("x-polykv-miss"), log_probs)
