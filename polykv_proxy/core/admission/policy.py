"""What a pool asks for: a floor of tokens per second, and what happens to those who would break it.

Law: frozen values within bounds; what is out of bounds is an ApiError 400 that names the field and what may stand there. A pool
without a policy of its own has that of the nearest pool above it, whole; both are then one scope, with one guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from math import isfinite

from polykv_proxy.errors import ApiError

DEFAULT_SCOPE = 0
"""The scope of requests without a pool; pool ids begin at 1."""


class Mode(StrEnum):
    """`advisory`: only figures; nobody is refused. `enforced`: new sessions are held, refused or warned."""

    ADVISORY = "advisory"
    ENFORCED = "enforced"


class OnSaturation(StrEnum):
    """What an enforced policy does with a new session for which there is no room."""

    REJECT = "reject"
    WARN = "warn"
    QUEUE = "queue"


class WhileHeld(StrEnum):
    """What a stream that waits is sent: nothing, SSE comments, or chunks without choices."""

    SILENCE = "silence"
    COMMENTS = "comments"
    CHUNKS = "chunks"


@dataclass(frozen=True, slots=True)
class Bounds:
    """From `low` to `high`, whole numbers only where both are."""

    low: float
    high: float

    def accepts(self, value: object) -> bool:
        """Is it a number within?"""
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or (isinstance(self.low, int) and not isinstance(value, int))
        ):
            return False
        return isfinite(value) and self.low <= value <= self.high

    def __str__(self) -> str:
        what = "a whole number" if isinstance(self.low, int) else "a number"
        return f"{what} from {self.low:g} to {self.high:g}"


BOUNDS: Mapping[str, Bounds] = {
    "target_tps_per_session": Bounds(0.001, 1e6),
    "guarantee_min_sessions": Bounds(0, 4096),
    "settle_tokens": Bounds(1, 65536),
    "settle_max_ms": Bounds(1, 600_000),
    "max_queue": Bounds(0, 65536),
    "queue_timeout_ms": Bounds(1, 3_600_000),
}
_NO_FLOOR = f"target_tps_per_session is missing; it must be {BOUNDS['target_tps_per_session']}"
_WORDS: Mapping[str, type[StrEnum]] = {"mode": Mode, "on_saturation": OnSaturation, "while_held": WhileHeld}
_FLAGS = ("fail_fast", "protect_floors")


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy. The floor is `target_tps_per_session`, for the mean over all sessions that decode.

    `guarantee_min_sessions` are let in whatever the floor says. `settle_tokens` and `settle_max_ms`: how long the effect of an
    admission is waited for. `fail_fast`: who is refused is told not to try again. `protect_floors` (default policy only): requests
    without a pool respect the floors of pools too.
    """

    target_tps_per_session: float
    mode: Mode = Mode.ADVISORY
    on_saturation: OnSaturation = OnSaturation.REJECT
    guarantee_min_sessions: int = 1
    settle_tokens: int = 48
    settle_max_ms: int = 5000
    max_queue: int = 64
    queue_timeout_ms: int = 30_000
    while_held: WhileHeld = WhileHeld.SILENCE
    fail_fast: bool = False
    protect_floors: bool = False

    def __post_init__(self) -> None:
        for name, bounds in BOUNDS.items():
            _demand(bounds.accepts(getattr(self, name)), name, getattr(self, name), str(bounds))

    @property
    def settle_max_s(self) -> float:
        """Seconds, from the first token of the admitted session."""
        return self.settle_max_ms / 1000

    @property
    def hold_s(self) -> float:
        """How long settling alone may hold somebody."""
        return self.settle_max_s + 1

    @property
    def queue_timeout_s(self) -> float:
        """How long somebody may wait for room."""
        return self.queue_timeout_ms / 1000

    @property
    def enforced(self) -> bool:
        """Does it act at all?"""
        return self.mode is Mode.ENFORCED

    def as_object(self) -> Mapping[str, object]:
        """JSON-ready; `policy_of` reads it again."""
        return {name: str(value) if isinstance(value, StrEnum) else value for name, value in asdict(self).items()}


def policy_of(given: Mapping[str, object], base: Policy | None = None, *, for_pool: bool = True) -> Policy:
    """The policy that a caller asked for; what is left out is as in `base`, else the default. ApiError 400 for anything else."""
    known = [field.name for field in fields(Policy)]
    for name in given:
        _demand(name in known, name, given[name], f"left out; an admission policy has the fields {', '.join(known)}")
    if base is None and "target_tps_per_session" not in given:
        raise ApiError("invalid_request", _NO_FLOOR, param="target_tps_per_session")
    _demand(not (for_pool and given.get("protect_floors")), "protect_floors", True, "left out: only the default policy has it")
    taken = {name: _value(name, value) for name, value in given.items()}
    if base is None:
        return Policy(**taken)  # type: ignore[arg-type]
    return replace(base, **({"protect_floors": False} if for_pool else {}) | taken)  # type: ignore[arg-type]


def objections(given: Mapping[str, object], *, for_pool: bool = True) -> dict[str, str]:
    """What is wrong with each field, in words; empty where `policy_of` takes them all."""
    found: dict[str, str] = {}
    if "target_tps_per_session" not in given:
        found["target_tps_per_session"] = _NO_FLOOR
    for name, value in given.items():
        try:
            policy_of({name: value}, Policy(1.0), for_pool=for_pool)
        except ApiError as error:
            found[name] = error.message
    return found


def _value(name: str, value: object) -> object:
    if name in _WORDS:
        words = [str(word) for word in _WORDS[name]]
        _demand(value in words, name, value, f"one of {', '.join(words)}")
        return _WORDS[name](str(value))
    if name in _FLAGS:
        _demand(isinstance(value, bool), name, value, "true or false")
    return value


def _demand(condition: bool, name: str, value: object, wanted: str) -> None:
    if not condition:
        raise ApiError("invalid_request", f"{name} is {value!r}; it must be {wanted}", param=name)


@dataclass(frozen=True, slots=True)
class Ruling:
    """The policy that holds somewhere, and the scope that it is shared by: the pool that has it, or DEFAULT_SCOPE."""

    scope: int
    policy: Policy


class Policies:
    """All policies. `parent_of` knows the tree: the pool above a pool, None for a root or a pool that is gone."""

    def __init__(self, parent_of: Callable[[int], int | None]) -> None:
        self._parent_of = parent_of
        self._own: dict[int, Policy] = {}

    def __iter__(self) -> Iterator[Ruling]:
        return iter([Ruling(scope, policy) for scope, policy in self._own.items()])

    def __len__(self) -> int:
        return len(self._own)

    def set(self, scope: int, policy: Policy) -> None:
        """From now on; DEFAULT_SCOPE for requests without a pool."""
        self._own[scope] = policy

    def remove(self, scope: int) -> Policy | None:
        """The policy that was taken away; None when there was none of its own."""
        return self._own.pop(scope, None)

    def own(self, scope: int) -> Policy | None:
        """What was set here and not above."""
        return self._own.get(scope)

    def ruling(self, pool_id: int | None) -> Ruling | None:
        """What holds for new sessions of a pool, or for those without one. One look-up where there are no policies."""
        if not self._own:
            return None
        scope = pool_id if pool_id is not None else DEFAULT_SCOPE
        while scope not in self._own:
            above = self._parent_of(scope) if scope != DEFAULT_SCOPE else None
            if above is None:
                return None
            scope = above
        return Ruling(scope, self._own[scope])

    def floor(self, ruling: Ruling) -> float:
        """Tokens per second that the mean may not fall below for this ruling's sake."""
        own = ruling.policy.target_tps_per_session
        if not ruling.policy.protect_floors:
            return own
        return max([own, *(other.policy.target_tps_per_session for other in self if other.policy.enforced)])
