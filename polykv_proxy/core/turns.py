"""What one turn took, from its last event.

Law: pure; a figure that cannot be formed is None.
"""

from __future__ import annotations

from dataclasses import dataclass

from polykv_proxy.core.events import SlotEvent


@dataclass(frozen=True, slots=True)
class Turn:
    """What a task took, in seconds and tokens; None where it did not get that far. Waits before the engine are in the first two.

    `prompt_tps` counts computed tokens only. `tps`: tokens after the first by the time since it; `tpot_s` is its inverse.
    """

    req: int
    session: int
    reason: str | None
    n_prompt: int
    n_cached: int
    n_decoded: int
    queue_s: float
    ttft_s: float | None
    prompt_tps: float | None
    tps: float | None
    tpot_s: float | None


def turn_of(event: SlotEvent, waited_s: float = 0.0) -> Turn:
    """The figures in an event; those of `released` are final."""
    n_timed, n_computed = event.n_decoded - 1, event.n_prompt - event.n_cached
    queue_s = waited_s + max(0, event.us_queued) / 1e6
    timed = n_timed > 0 and event.us_decode > 0
    return Turn(
        event.req,
        event.session,
        event.reason,
        event.n_prompt,
        event.n_cached,
        event.n_decoded,
        queue_s,
        queue_s + event.us_prompt / 1e6 if event.us_prompt > 0 and not event.fill else None,
        n_computed / event.us_prompt * 1e6 if event.us_prompt > 0 and n_computed > 0 else None,
        n_timed / event.us_decode * 1e6 if timed else None,
        event.us_decode / n_timed / 1e6 if timed else None,
    )
