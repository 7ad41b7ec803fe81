"""The last request of each named session: what its KV can be computed from again when it is gone.

Law: only requests that name a session are kept, as they came and in memory alone, never parsed here; of each session the newest, in
all at most `LIMIT_BYTES`, the longest unused go first. What is rebuilt is the prompt of a turn, not what was generated after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polykv_proxy.core.prefix import Tokens, as_tokens
from polykv_proxy.engine.client import EngineClient
from polykv_proxy.errors import ApiError, EngineRefusedError
from polykv_proxy.ports import Header

LAST_TURN = "last_turn"
"""The source of a pool that was computed from the last request of a session."""
LIMIT_BYTES = 64 * 1024 * 1024
_UNKNOWN = "and the proxy does not have its last request any more"


@dataclass(frozen=True, slots=True)
class Turn:
    """An answered request on a generating route: its target, its body, the headers by which that is read. `ts`: Unix seconds."""

    target: str
    body: bytes
    headers: tuple[Header, ...]
    ts: float


class LastTurns:
    """Turns by session id."""

    def __init__(self, client: EngineClient, limit_bytes: int = LIMIT_BYTES) -> None:
        self._client = client
        self._limit = limit_bytes
        self._turns: dict[str, Turn] = {}
        self._n_bytes = 0

    def keep(self, session_id: str, turn: Turn) -> None:
        """The newest turn of a session. One that is larger than all that may be kept leaves none: an older one would be untrue."""
        self.forget(session_id)
        if len(turn.body) > self._limit:
            return
        self._turns[session_id] = turn
        self._n_bytes += len(turn.body)
        while self._n_bytes > self._limit:
            self.forget(next(iter(self._turns)))

    def forget(self, session_id: str) -> None:
        """The session was ended; fine for an unknown one."""
        turn = self._turns.pop(session_id, None)
        self._n_bytes -= len(turn.body) if turn is not None else 0

    def expire(self, before_ts: float, living: Callable[[str], object]) -> None:
        """Forget the turns of sessions that are no more; one that a new boot of the engine ended stays as long as it would."""
        for session_id in [one for one, turn in self._turns.items() if turn.ts <= before_ts and not living(one)]:
            self.forget(session_id)

    async def prompt_of(self, session_id: str, n_tokens: int | None) -> Tokens:
        """The tokens of the prompt of its last turn, or the first `n_tokens` of them, by the engine of today. ApiError."""
        turn = self._turns.get(session_id)
        if turn is None:
            raise _gone(session_id, _UNKNOWN)
        try:
            prompts = await self._client.dry_run(turn.target, turn.body, turn.headers)
        except EngineRefusedError as error:
            if error.status == 503:
                raise
            raise _gone(session_id, f"and this engine refuses its last request: {error.message}") from error
        prompt = prompts[0] if prompts else as_tokens([])
        if n_tokens is not None and n_tokens > prompt.size:
            message = f"n_tokens is {n_tokens}, but the prompt of the last turn of session {session_id!r} has {prompt.size} tokens"
            raise ApiError("invalid_request", message, param="n_tokens")
        return prompt[:n_tokens]

    def can_stand_in(self, session_id: str, error: Exception) -> bool:
        """Does this error of a snapshot say that there is no KV, of a session that is or was there?"""
        if isinstance(error, EngineRefusedError):
            return error.kind == "session_not_resident"
        return isinstance(error, ApiError) and error.code == "session_not_found" and session_id in self._turns

    def gone(self, session_id: str) -> ApiError:
        """Why there is no snapshot of a session without KV, and what helps."""
        known = session_id in self._turns
        return _gone(session_id, 'and "rebuild": true would compute the prompt of its last turn again' if known else _UNKNOWN)


def _gone(session_id: str, more: str) -> ApiError:
    return ApiError("session_not_resident", f"the engine holds no KV of session {session_id!r}, {more}", param="from_session")
