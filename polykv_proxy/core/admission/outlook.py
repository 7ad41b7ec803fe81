"""What is known, and what it says of one newcomer: policies, reservations, sessions and forecasts under one look.

Law: `look`, `examine` and `headroom` change nothing; they are the same for the gate, which acts on them, and for whoever only asks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from polykv_proxy.core.admission import arms
from polykv_proxy.core.admission.arms import Scope, Taken
from polykv_proxy.core.admission.forecast import FRESH_S, Basis, Forecast, Pending
from polykv_proxy.core.admission.line import Ask
from polykv_proxy.core.admission.load import Load
from polykv_proxy.core.admission.policy import DEFAULT_SCOPE, Policies, Ruling
from polykv_proxy.core.admission.reservations import Answers, Need, Reservations
from polykv_proxy.core.admission.sessions import Attachments
from polykv_proxy.core.admission.verdict import Arm, Finding, Reason


@dataclass(frozen=True, slots=True)
class Look:
    """All that one examination of one newcomer was made from."""

    need: Need
    taken: Taken
    pending: Pending
    basis: Basis | None
    scope: Scope


class Outlook:
    """The knowledge of one gate. `max_running`: the bound of the whole server, None without."""

    def __init__(self, parent_of: Callable[[int], int | None], max_running: int | None) -> None:
        self.policies = Policies(parent_of)
        self.reservations = Reservations()
        self.attached = Attachments()
        self.forecasts: defaultdict[int, Forecast] = defaultdict(Forecast)
        self.answers: defaultdict[int, Answers] = defaultdict(Answers)
        self.max_running = max_running

    def look(self, ask: Ask, ruling: Ruling | None, load: Load, now: float) -> Look:
        """The figures that decide about a newcomer; without a ruling there is no floor and no guarantee."""
        pending = Pending(
            load.n_warming + self.reservations.unseen(load),
            sum(forecast.n_unsettled(load) for forecast in self.forecasts.values()),
            self.attached.paused(now - FRESH_S),
        )
        forecast = self.forecasts[ruling.scope] if ruling is not None else Forecast()
        n_attached = self.n_attached(ruling, ask.pool_id)
        basis = forecast.basis(load, n_attached, pending, now)
        scope = Scope(
            n_attached=n_attached,
            guarantee=ruling.policy.guarantee_min_sessions if ruling is not None else 0,
            floor=self.policies.floor(ruling) if ruling is not None else 0.0,
            settling_s=forecast.remaining_s(ruling.policy, now) if ruling is not None and forecast.settling else None,
            projection=forecast.project(basis, pending) if ruling is not None else forecast.project(None, Pending()),
        )
        taken = Taken(self.reservations.slots(load), self.reservations.cells(load))
        return Look(self.need(ask, load), taken, pending, basis, scope)

    def need(self, ask: Ask, load: Load) -> Need:
        """What a request will take; an answer without a limit is charged what answers of its pool are like.

        Of more tasks than there are slots the engine runs so many at a time, and never more.
        """
        n_answer = self.answers[ask.pool_id or DEFAULT_SCOPE].estimate if ask.max_tokens is None else ask.max_tokens
        if load.n_ctx_slot is not None:
            n_answer = min(n_answer, load.n_ctx_slot - ask.n_prefix - ask.n_prompt)
        n_slots = min(ask.n_tasks, load.slots_total) if load.slots_total > 0 else ask.n_tasks
        return Need(max(1, n_slots), max(0, ask.n_prompt), max(0, n_answer))

    def n_attached(self, ruling: Ruling | None, pool_id: int | None) -> int:
        """Sessions of the scope; without a ruling those of the pool itself."""
        per_pool = self.attached.per_pool()
        if ruling is None:
            return per_pool[pool_id]
        holds = ((self.policies.ruling(pool), n) for pool, n in per_pool.items())
        return sum(n for found, n in holds if found is not None and found.scope == ruling.scope)

    def examine(self, ask: Ask, look: Look, load: Load, *, settled: bool) -> Finding:
        """May this newcomer begin? 1. What never fits; 2. the bound of the server; 3. the arms."""
        found = self.hard(ask, look.need, load)
        return arms.examine(load, look.taken, look.need, look.scope, settled=settled) if found.ok else found

    def hard(self, ask: Ask, need: Need, load: Load) -> Finding:
        """What holds for everybody, policy or not."""
        found = arms.fits_at_all(load, ask.n_prefix, need)
        return arms.running(len(self.reservations), self.max_running) if found.ok else found

    def ungated(self, ask: Ask, ruling: Ruling | None) -> Finding:
        """Why no policy stops it."""
        if ask.continues or self.attached.known(ask.session):
            return Finding(True, Arm.CONTINUATION, Reason.CONTINUATION)
        if ruling is None:
            return Finding(True, Arm.NO_POLICY, Reason.NO_POLICY)
        return Finding(True, Arm.OVERCOMMIT, Reason.OVERCOMMIT) if ask.overcommit else arms.OK

    def headroom(self, look: Look, ruling: Ruling | None, load: Load) -> int:
        """Sessions that may still start: the least that any arm says; 0 while settling; what is guaranteed is never less."""
        solid = arms.room_by_matter(load, look.taken, look.need, reserve=False)
        spare = arms.room_by_matter(load, look.taken, look.need, reserve=True)
        if self.max_running is not None:
            left = max(0, self.max_running - len(self.reservations))
            solid, spare = min(left, solid), min(left, spare)
        if ruling is None:
            return spare
        if look.scope.settling_s is not None:
            return 0
        guaranteed = min(solid, max(0, look.scope.guarantee - look.scope.n_attached))
        return max(guaranteed, self.forecasts[ruling.scope].room(look.basis, look.pending, look.scope.floor, spare))
