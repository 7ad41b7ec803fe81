"""An engine as a law of step times: a step takes a + b·(who decodes) + c·(their contexts) + p·(prompt tokens in it).

Every step gives each decoder one token; prompts share the step, first come first served, up to `n_batch` tokens of them: while
somebody's prompt is computed, all others wait for longer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from polykv_proxy.core.admission.load import Load, Run
from polykv_proxy.core.pace import Pace

LEAST_STEP_S = 1e-6


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Seconds: `a` for a step, `b` for each decoder, `c` for each token of their contexts, `p` for each prompt token."""

    a: float
    b: float
    c: float
    p: float

    def step_s(self, n_decoding: float, n_context: float, n_prompt: float) -> float:
        return max(LEAST_STEP_S, self.a + self.b * n_decoding + self.c * n_context + self.p * n_prompt)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured stretch: its mean step, and what was in it."""

    step_s: float
    n_decoding: float
    n_context: float
    n_prompt: float = 0.0


def fit(samples: Sequence[Sample]) -> StepLaw:
    """Least squares over relative errors, nothing negative: terms that would be are left out, and the rest fitted anew."""
    rows = np.array([[1.0, s.n_decoding, s.n_context, s.n_prompt] for s in samples])
    steps = np.array([s.step_s for s in samples])
    rows, steps = rows / steps[:, None], np.ones(len(samples))
    kept = [i for i in range(4) if np.any(rows[:, i])]
    while True:
        scale = np.abs(rows[:, kept]).max(axis=0)
        found = np.linalg.lstsq(rows[:, kept] / scale, steps, rcond=None)[0] / scale
        if (found >= 0).all():
            break
        kept.pop(int(np.argmin(found * scale)))
    values = dict(zip(kept, found.tolist(), strict=True))
    return StepLaw(*(values.get(i, 0.0) for i in range(4)))


@dataclass(slots=True)
class Task:
    """One request. `pace` is its session's, and goes on with it; `timed` tokens are in the pace."""

    req: int
    n_context: float
    n_prompt: float
    n_answer: int
    pace: Pace
    decoded: float = 0.0
    began_at: float = 0.0
    first_at: float | None = None
    ended_at: float = 0.0
    timed: int = 1
    timed_at: float = 0.0


@dataclass(slots=True)
class SimEngine:
    """Slots, and tasks that wait for one."""

    law: StepLaw
    n_slots: int = 16
    n_batch: int = 512
    n_cells: int = 200_000
    now: float = 0.0
    running: dict[int, Task] = field(default_factory=dict)
    waiting: list[Task] = field(default_factory=list)
    n_decoded: float = 0.0
    busy_s: float = 0.0
    """In which somebody's step was computed."""

    def submit(self, task: Task) -> None:
        self.waiting.append(task)
        self._launch()

    def advance(self, seconds: float) -> list[Task]:
        """Time passes; the tasks that ended in it."""
        ended: list[Task] = []
        until = self.now + seconds
        while self.now < until - 1e-9:
            ended += self._stretch(until - self.now)
            self._launch()
        self.now = until
        for task in self.running.values():
            self._time(task)
        return ended

    def _launch(self) -> None:
        while self.waiting and len(self.running) < self.n_slots:
            task = self.waiting.pop(0)
            task.began_at = self.now
            self.running[task.req] = task

    def _stretch(self, at_most: float) -> list[Task]:
        """Until somebody's prompt or answer ends, or the time is over."""
        prompts = [task for task in self.running.values() if task.n_prompt > 0]
        decoding = [task for task in self.running.values() if task.n_prompt <= 0]
        if not self.running:
            self.now += at_most
            return []
        batch = min(self.n_batch, sum(task.n_prompt for task in prompts))
        step_s = self.law.step_s(len(decoding), sum(task.n_context + task.decoded for task in decoding), batch)
        steps = at_most / step_s
        if decoding:
            steps = min(steps, *(task.n_answer - task.decoded for task in decoding))
        if prompts:
            steps = min(steps, prompts[0].n_prompt / batch)
        self.now += steps * step_s
        self.busy_s += steps * step_s
        self.n_decoded += steps * len(decoding)
        for task in decoding:
            task.decoded += steps
        if prompts:
            self._prompted(prompts[0], steps * batch)
        return [self._end(task) for task in decoding if task.decoded >= task.n_answer - 1e-6]

    def _prompted(self, task: Task, n_tokens: float) -> None:
        task.n_prompt -= n_tokens
        task.n_context += n_tokens
        if task.n_prompt < 1e-6:
            task.n_prompt, task.decoded, task.first_at, task.timed_at = 0.0, 1.0, self.now, self.now

    def _end(self, task: Task) -> Task:
        del self.running[task.req]
        task.ended_at = self.now
        self._time(task)
        return task

    def _time(self, task: Task) -> None:
        n_new = int(task.decoded + 1e-6) - task.timed
        if task.first_at is not None and n_new > 0:
            task.pace = task.pace.after(n_new, self.now - task.timed_at)
            task.timed, task.timed_at = task.timed + n_new, self.now

    # -- what a proxy would see -----------------------------------------------------------------------------------------

    def paces(self) -> list[float]:
        """Of those that decode and have a figure."""
        return [task.pace.value for task in self.running.values() if task.first_at is not None and task.pace.value is not None]

    def load(self) -> Load:
        """As the counters tell it."""
        paces = self.paces()
        used = sum(task.n_context + task.decoded for task in self.running.values())
        return Load(
            sum(paces) / len(paces) if paces else None,
            len(paces),
            len(self.running) - len(paces),
            slots_total=self.n_slots,
            slots_busy=len(self.running),
            cells_total=self.n_cells,
            cells_free=max(0, int(self.n_cells - used)),
            runs={req: Run(int(task.decoded) if task.first_at is not None else 0) for req, task in self.running.items()},
        )
