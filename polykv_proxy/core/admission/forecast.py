"""What the mean would be with one session more, from what admissions did to it before.

Law: pure; every figure is finite or None. A projection falls with each session that is on its way and not in the mean yet, and
rises with the mean. What turns lend each other in their gaps is not room: what the mean was below in a tenth of the last
minute counts, if it is lower than that of this moment (ADR 13).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite

from polykv_proxy.core.admission.load import Load
from polykv_proxy.core.admission.policy import Policy
from polykv_proxy.core.pace import WINDOW_S

ALPHA = 0.3
MEMORY_S = 60.0
LOW = 0.1
SPACING_S = 0.25
"""Settled means are kept so long and no closer; a tenth of them may be below what counts."""
FRESH_S = 30.0
"""With nobody decoding: when the last settled mean is older than that, the scope was idle, and has its capacity."""
GONE_S = 5 * WINDOW_S
"""After that time the paces, averages of the last seconds, no longer speak of somebody who left."""
HARD_CAP = 4
"""A window ends so many `settle_max_ms` after the admission, even when no first token came."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time in which an admission makes itself felt. `n_before` sessions made the mean before it; `n_open` windows were open
    together with it, itself included. `clean`: nobody left shortly before it, or in it.
    """

    opened_at: float
    mean_before: float | None
    n_before: int = 1
    n_open: int = 1
    clean: bool = True
    first_at: float | None = None
    n_decoded: int = 0

    def remaining_s(self, policy: Policy, now: float) -> float:
        """Until it ends by time."""
        by_cap = self.opened_at + HARD_CAP * policy.settle_max_s
        return max(0.0, (by_cap if self.first_at is None else min(by_cap, self.first_at + policy.settle_max_s)) - now)

    def over(self, policy: Policy, now: float) -> bool:
        """By tokens of the admitted session, or by time."""
        return self.n_decoded >= policy.settle_tokens or self.remaining_s(policy, now) <= 0


@dataclass(frozen=True, slots=True)
class Projection:
    """The mean as it would be. `used` is what the floor is held against; `unknown`: sessions warm up and nothing tells how fast."""

    model: float | None = None
    measured: float | None = None
    idle: bool = False
    unknown: bool = False

    @property
    def used(self) -> float | None:
        """The measured one where there is one."""
        return self.model if self.measured is None else self.measured


@dataclass(frozen=True, slots=True)
class Pending:
    """Sessions that the mean does not speak of: `warming` or not seen yet, and `unsettled`, which it counts and does not show.

    `paused` ones are between turns; what the mean is with them back is known as far as the last minute is.
    """

    warming: int = 0
    unsettled: int = 0
    paused: int = 0

    @property
    def all(self) -> int:
        """Those on their way."""
        return self.warming + self.unsettled


def slowed(tps: float, seconds: float) -> float:
    """A pace, when each token takes so much longer. What takes less may at most be twice as fast: a guess stays one."""
    return 1 / max(1 / tps + seconds, 0.5 / tps) if tps > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Basis:
    """A mean, the sessions that it is of, and those on their way that are not in it."""

    mean: float
    n: int
    n_pending: float
    idle: bool = False

    def model(self) -> float:
        """With one more, all that the engine gives shared by all: the saturated knee."""
        return self.mean * self.n / (self.n + self.n_pending + 1)

    def measured(self, cost_s: float) -> float:
        """With one more, at what an admission cost each token before, for each that is not in the mean."""
        return slowed(self.mean, cost_s * (self.n_pending + 1))


class Forecast:
    """The settle windows of one scope, and what they taught."""

    def __init__(self) -> None:
        self.drop_ewma: float | None = None
        """Tokens per second that the mean lost by an admission: what people ask for."""
        self.cost_s: float | None = None
        """Seconds that it added to each token: what is projected from, for it is much the same at any speed (ADR 14)."""
        self.n_samples = 0
        self._windows: dict[int, Window] = {}
        self._left_at = -GONE_S
        self._settled: deque[tuple[float, float]] = deque()
        self._low: float | None = None
        """What a tenth of the settled means is below."""

    # -- what comes in ------------------------------------------------------------------------------------------------

    def admitted(self, req: int, load: Load, now: float) -> None:
        """A new session starts; the mean is what it was just before."""
        n_open = len(self._windows) + 1
        self._windows = {key: replace(window, n_open=window.n_open + 1) for key, window in self._windows.items()}
        clean = now - self._left_at >= GONE_S
        self._windows[req] = Window(now, load.mean_active_tps, max(1, load.n_active), n_open, clean)

    def observe(self, policy: Policy, load: Load, now: float) -> None:
        """One look at the engine: windows get on or end, and a settled mean is noted."""
        for req, window in list(self._windows.items()):
            run = load.runs.get(req)
            if run is not None and run.n_decoded > window.n_decoded:
                first_at = now if window.first_at is None else window.first_at
                window = replace(window, n_decoded=run.n_decoded, first_at=first_at)  # noqa: PLW2901
                self._windows[req] = window
            if window.over(policy, now):
                self._end(req, policy, load)
        if not self._windows and load.mean_active_tps is not None:
            self._note(load.mean_active_tps, now)

    def closed(self, req: int, policy: Policy, load: Load | None) -> None:
        """The admitted request is over, and its window with it."""
        if req in self._windows:
            self._end(req, policy, load or Load())

    def left(self, now: float) -> None:
        """A session is gone: means of before become what they would be without it; where nobody knows, they are forgotten."""
        self._left_at = now
        self._windows = {req: replace(window, clean=False) for req, window in self._windows.items()}
        if self.cost_s is None:
            self.forget_means()
        else:
            self._shift(-1, 1.0)

    def forget_means(self) -> None:
        """The engine is another: its means are not to come."""
        self._keep(())

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def settling(self) -> bool:
        """Is the effect of an admission still awaited?"""
        return bool(self._windows)

    def n_unsettled(self, load: Load) -> int:
        """Sessions that decode and whose effect is not in the mean yet."""
        return sum(req in load.runs and load.runs[req].n_decoded > 0 for req in self._windows)

    def remaining_s(self, policy: Policy, now: float) -> float:
        """Until it is settled, at the latest; 0 when it is."""
        return max((window.remaining_s(policy, now) for window in self._windows.values()), default=0.0)

    def basis(self, load: Load, n_attached: int, pending: Pending, now: float) -> Basis | None:
        """1. The mean, or what it was below in a tenth of the time; 2. between turns of all: the latter; 3. nothing is known."""
        age = now - self._settled[-1][0] if self._settled else MEMORY_S
        low = self._low if age < MEMORY_S else None
        if load.mean_active_tps is not None:
            mean = load.mean_active_tps if low is None else min(low, load.mean_active_tps)
            unknown = max(0.0, 1 - (now - self._settled[0][0]) / MEMORY_S) if self._settled else 1.0
            return Basis(mean, max(1, load.n_active - pending.unsettled), pending.all + unknown * pending.paused)
        if low is not None and n_attached > 0 and age < FRESH_S:
            return Basis(low, max(1, n_attached - pending.all), pending.all, idle=True)
        return None

    def project(self, basis: Basis | None, pending: Pending) -> Projection:
        """The mean with one more."""
        if basis is None:
            return Projection(unknown=pending.all > 0)
        measured = None if self.cost_s is None else basis.measured(self.cost_s)
        return Projection(basis.model(), measured, basis.idle)

    def room(self, basis: Basis | None, pending: Pending, floor: float, at_most: int) -> int:
        """How many more keep the floor, by the projection that is used; at most one while no drop was measured."""
        projection = self.project(basis, pending)
        if projection.unknown or (projection.used is not None and projection.used < floor):
            return 0
        if self.cost_s is None:
            return min(1, at_most)
        if basis is None or self.cost_s <= 0:
            return at_most
        spare = (1 / floor - 1 / basis.mean) / self.cost_s - basis.n_pending
        return min(at_most, max(1, int(min(spare, at_most))))

    def _note(self, mean: float, now: float) -> None:
        while len(self._settled) > 1 and now - self._settled[1][0] >= MEMORY_S:
            self._settled.popleft()
        if not self._settled or now - self._settled[-1][0] >= SPACING_S:
            self._keep((*self._settled, (now, mean)))

    def _keep(self, settled: Iterable[tuple[float, float]]) -> None:
        self._settled = deque(settled)
        means = sorted(mean for _, mean in self._settled)
        self._low = means[int(LOW * len(means))] if means else None

    def _shift(self, sign: int, by_model: float) -> None:
        """By the measured cost of a session more (1) or less (-1); else by the model."""
        cost_s = self.cost_s
        after = (slowed(mean, sign * cost_s) if cost_s is not None else mean * by_model for _, mean in self._settled)
        self._keep(zip([at for at, _ in self._settled], after, strict=True))

    def _end(self, req: int, policy: Policy, load: Load) -> None:
        """Fold what it did; and means of before become what they would have been with the session, if it ever decoded.

        Only what nobody else did counts as the cost: no other session came, paused or left.
        """
        window, mean = self._windows.pop(req), load.mean_active_tps
        if window.n_decoded >= policy.settle_tokens and window.mean_before and mean:
            drop = max(0.0, window.mean_before - mean) / window.n_open
            cost_s = max(0.0, 1 / mean - 1 / window.mean_before) / window.n_open
            self.drop_ewma = _folded(self.drop_ewma, drop)
            self.n_samples += 1
            if window.clean and load.n_active == window.n_before + 1 and isfinite(cost_s):
                self.cost_s = _folded(self.cost_s, cost_s)
        if window.first_at is not None:
            self._shift(1, window.n_before / (window.n_before + 1))


def _folded(average: float | None, sample: float) -> float:
    return sample if average is None else (1 - ALPHA) * average + ALPHA * sample
