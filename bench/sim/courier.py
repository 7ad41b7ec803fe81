"""The courier: brings packages to the engine by one of five rules, and notes how it went.

`none`: all at once. `fixed`: as many at a time as the law of the engine says keep the floor. `naive`: every five seconds one more
while the raw mean, those who warm up counted as zero, is at the floor. `advisory`: one more when `capacity` says so and nobody
warms up. `enforced`: all ask at once; the gate holds them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.sim.engine import SimEngine, StepLaw, Task
from bench.sim.fleet import Result, Work
from polykv_proxy.core.admission.capacity import capacity
from polykv_proxy.core.admission.gate import Gate, Limits
from polykv_proxy.core.admission.line import Ask
from polykv_proxy.core.admission.load import Load
from polykv_proxy.core.admission.policy import Mode, OnSaturation, Policy
from polykv_proxy.core.admission.verdict import Arm, Outcome, Verdict
from polykv_proxy.core.pace import Pace

RULES = ("none", "fixed", "naive", "advisory", "enforced")
TICK_S = 0.1
"""The cadence of the engine's counters."""
POOL = 1


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Seconds between two looks: of `naive`, and of who asks `capacity`."""

    naive_s: float = 5.0
    poll_s: float = 1.0


USUAL = Rhythm()


@dataclass(slots=True)
class Agent:
    """One package on its way: its next turn, its pace, the context that it has."""

    number: int
    asked_at: float
    began_at: float | None = None
    turn: int = 0
    n_context: float = 0.0
    pace: Pace = field(default_factory=Pace)
    n_timed: int = 0
    timed_s: float = 0.0

    @property
    def name(self) -> str:
        return f"agent-{self.number}"


def policy_for(rule: str, floor: float) -> Policy:
    """What the courier of that rule sets."""
    mode = Mode.ENFORCED if rule == "enforced" else Mode.ADVISORY
    return Policy(floor, mode, OnSaturation.QUEUE, max_queue=1024, queue_timeout_ms=3_600_000)


def at_the_floor(law: StepLaw, floor: float, n_context: float) -> int:
    """How many decode at once at the floor or above, by the law; at least one."""
    return max([n for n in range(1, 65) if law.step_s(n, n * n_context, 0) <= 1 / floor], default=1)


class Courier:
    """One run. `policy` None: nobody asks anybody."""

    def __init__(
        self,
        work: Work,
        law: StepLaw,
        rule: str,
        floor: float,
        policy: Policy | None = None,
        *,
        rhythm: Rhythm = USUAL,
        n_slots: int = 16,
    ) -> None:
        self.work, self.rule, self.floor, self.rhythm = work, rule, floor, rhythm
        self.engine = SimEngine(law, n_slots)
        self.n_fixed = at_the_floor(law, floor, work.n_prefix)
        self.gate = Gate(Limits(), {}.get)
        if rule in {"advisory", "enforced"}:
            self.gate.set_policy(POOL, policy or policy_for(rule, floor))
        self.result = Result(n_tokens=work.n_tokens)
        self.agents: dict[int, Agent] = {}
        self.to_spawn = list(range(len(work.packages)))
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.n_due = self.n_req = 0
        self.of_req: dict[int, Agent] = {}
        self.n_done = 0
        self.next_look = 0.0
        self.load = Load()
        self.forecast: tuple[float, int] | None = None

    # -- the run ----------------------------------------------------------------------------------------------------------

    def run(self, *, most_s: float = 1e5) -> Result:
        """Until all is delivered."""
        while self.n_done < len(self.work.packages):
            done = f"{self.n_done} of {len(self.work.packages)} packages"
            assert self.engine.now < most_s, f"{self.rule}: {done} after {most_s:g} s"
            self.step()
        self.result.wall_s = max(self.result.turnarounds)
        return self.result

    def step(self) -> None:
        """One tick: look, let in, act, and let the engine work."""
        now = self.engine.now
        self.load = self.engine.load()
        self._note()
        self._take(self.gate.wake(self.load, now))
        while self.due and self.due[0][0] <= now:
            heapq.heappop(self.due)[2]()
        self._spawn(now)
        for task in self.engine.advance(TICK_S):
            self._turn_over(task)

    def _note(self) -> None:
        result, mean = self.result, self.load.mean_active_tps
        if mean is not None and mean < self.floor:
            result.under_s += TICK_S
            result.deep_s += TICK_S * (mean < self.floor / 2)
        result.n_running.append(sum(agent.began_at is not None for agent in self.agents.values()))
        if self.rule in {"advisory", "enforced"}:
            self._judge(mean)

    def _judge(self, mean: float | None) -> None:
        """When an admission has settled: what had been projected, and what came."""
        forecast = self.gate.outlook.forecasts[POOL]
        if self.forecast is not None and forecast.n_samples > self.forecast[1]:
            if mean:
                self.result.errors.append(abs(self.forecast[0] / mean - 1))
            self.forecast = None

    # -- spawning -----------------------------------------------------------------------------------------------------------

    def _spawn(self, now: float) -> None:
        if not self.to_spawn:
            return
        if self.rule in {"none", "enforced", "fixed"}:
            while self.to_spawn and (self.rule != "fixed" or len(self.agents) < self.n_fixed):
                self._begin()
        elif now >= self.next_look:
            self.next_look = now + (self.rhythm.naive_s if self.rule == "naive" else self.rhythm.poll_s)
            if self._may(now):
                self._begin()

    def _may(self, now: float) -> bool:
        if self.rule == "naive":
            running = len(self.engine.running)
            return not running or sum(self.engine.paces()) / running >= self.floor
        said = capacity(self.gate, self.load, now, POOL)
        return said.can_admit and said.n_warming == 0

    def _begin(self) -> None:
        agent = Agent(self.to_spawn.pop(0), self.engine.now, n_context=self.work.n_prefix)
        self.agents[agent.number] = agent
        self._ask(agent)

    # -- turns ---------------------------------------------------------------------------------------------------------------

    def _ask(self, agent: Agent) -> None:
        self.n_req += 1
        self.of_req[self.n_req] = agent
        turn = self.work.packages[agent.number][agent.turn]
        n_prompt = int(turn.n_prompt + agent.n_context - self.work.n_prefix)
        ask = Ask(self.n_req, POOL, agent.name, self.work.n_prefix, n_prompt, None)
        self._take([self.gate.ask(ask, self.load, self.engine.now)])

    def _take(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            agent = self.of_req[verdict.req]
            if verdict.outcome is Outcome.HELD:
                self.result.n_held += 1
            elif verdict.outcome.admits:
                self._submit(agent, verdict)
            else:
                self.result.n_refused += 1
                del self.of_req[verdict.req]
                assert verdict.retry_after_s is not None
                self._later(self.engine.now + verdict.retry_after_s, lambda agent=agent: self._ask(agent))

    def _submit(self, agent: Agent, verdict: Verdict) -> None:
        now = self.engine.now
        if agent.began_at is None:
            agent.began_at = now
            self.gate.session_attached(agent.name, POOL)
            self.result.n_guaranteed += verdict.finding.arm is Arm.GUARANTEE
            if verdict.finding.value is not None and verdict.finding.arm is Arm.NONE:
                self.forecast = (verdict.finding.value, self.gate.outlook.forecasts[POOL].n_samples)
        turn = self.work.packages[agent.number][agent.turn]
        self.engine.submit(Task(verdict.req, agent.n_context, turn.n_prompt, turn.n_answer, agent.pace))
        self.load = self.engine.load()

    def _turn_over(self, task: Task) -> None:
        agent = self.of_req.pop(task.req)
        turns = self.work.packages[agent.number]
        assert task.first_at is not None
        took = task.ended_at - task.first_at
        if took > 0:
            agent.n_timed += task.n_answer - 1
            agent.timed_s += took
            self.result.turn_tps.append((task.n_answer - 1) / took)
        agent.pace, agent.n_context = task.pace, task.n_context + task.n_answer
        self.gate.closed(task.req, task.ended_at, task.n_answer)
        agent.turn += 1
        if agent.turn < len(turns):
            self._later(task.ended_at + turns[agent.turn - 1].gap_s, lambda: self._ask(agent))
        else:
            self._delivered(agent, task.ended_at)

    def _delivered(self, agent: Agent, now: float) -> None:
        assert agent.began_at is not None
        self.n_done += 1
        del self.agents[agent.number]
        self.gate.session_ended(agent.name, now)
        self.result.deliveries.append(now - agent.began_at)
        self.result.turnarounds.append(now)
        self.result.sessions_tps.append(agent.n_timed / agent.timed_s)
        self.load = self.engine.load()
        if self.rule != "naive":
            self.next_look = now
        elif self.to_spawn and (self._may(now) or not self.agents):
            self._begin()

    def _later(self, when: float, what: Callable[[], None]) -> None:
        self.n_due += 1
        heapq.heappush(self.due, (when, self.n_due, what))


def deliver(work: Work, law: StepLaw, rule: str, floor: float, policy: Policy | None = None) -> Result:
    """One run."""
    return Courier(work, law, rule, floor, policy).run()
