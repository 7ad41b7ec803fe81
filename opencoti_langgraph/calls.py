"""The verbs of the proxy as values: what to send, and how to read the answer.

Law: no I/O. Each function is one verb; both clients bind the same functions, so neither has a verb that the other lacks. A call is
`repeatable` when sending it twice does no more than sending it once: reads, deletions, and creations that carry a key.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from pydantic import TypeAdapter

from opencoti_langgraph import results as r
from opencoti_langgraph.results import PoolRef

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
_POOL: TypeAdapter[r.Pool] = TypeAdapter(r.Pool)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. `read` makes the result of the answer's JSON."""

    method: str
    path: str
    read: Callable[[Any], T]
    json: dict[str, Any] | None = None
    params: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    repeatable: bool = True


def _at(pool: PoolRef, verb: str = "") -> str:
    return f"/polykv/pools/{quote(str(pool), safe='')}" + (f"/{verb}" if verb else "")


def _given(**fields: object) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _texts(**fields: object) -> dict[str, str]:
    """Query parameters that are given; booleans as 1."""
    return {
        name: str(int(value) if isinstance(value, bool) else value) for name, value in fields.items() if value not in {None, False}
    }


def _keyed(method: str, path: str, read: Callable[[Any], T], body: dict[str, Any], key: str | None, **params: object) -> Call[T]:
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    return Call(method, path, read, body, _texts(**params), headers)


def create_pool(
    *,
    tokens: Sequence[int] | None = None,
    prompt: str | None = None,
    messages: Messages | None = None,
    tools: Tools | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    from_session: str | None = None,
    n_tokens: int | None = None,
    rebuild: bool | None = None,
    name: str | None = None,
    ttl_s: float | None = None,
    wait: bool = True,
    idempotency_key: str | None = None,
) -> Call[r.Pool]:
    """Make a pool of exactly one of `tokens`, `prompt`, `messages` (with `tools`) and `from_session`.

    A pool for chats is made of `messages`: the proxy renders them by the model's template. Answers when the KV is there, or at once
    without `wait`. Every call carries an idempotency key (a new one unless given), so a lost answer costs no second pool; in return
    the work goes on when the caller leaves. Give `ttl_s` to pools that nobody else cleans up.
    """
    body = _given(
        tokens=_listed(tokens), prompt=prompt, messages=_dicts(messages), tools=_dicts(tools), from_session=from_session,
        chat_template_kwargs=chat_template_kwargs, n_tokens=n_tokens, rebuild=rebuild, name=name, ttl_s=ttl_s,
    )  # fmt: skip
    return _keyed("POST", "/polykv/pools", _POOL.validate_python, body, idempotency_key, wait=None if wait else "0")


def fork_pool(
    pool: PoolRef,
    *,
    branch_pos: int | None = None,
    tokens: Sequence[int] | None = None,
    prompt: str | None = None,
    messages: Messages | None = None,
    tools: Tools | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    from_session: str | None = None,
    n_tokens: int | None = None,
    rebuild: bool | None = None,
    name: str | None = None,
    ttl_s: float | None = None,
    wait: bool = True,
    idempotency_key: str | None = None,
) -> Call[r.Pool]:
    """Make a child of a pool. What is given is the child's FULL prefix; the common beginning is shared, never a suffix alone.

    Without `branch_pos` all that agrees is shared. `branch_pos` beyond that is a PoolConflictError (`prefix_mismatch`).
    """
    body = _given(
        branch_pos=branch_pos, tokens=_listed(tokens), prompt=prompt, messages=_dicts(messages), tools=_dicts(tools), ttl_s=ttl_s,
        from_session=from_session, chat_template_kwargs=chat_template_kwargs, n_tokens=n_tokens, rebuild=rebuild, name=name,
    )  # fmt: skip
    return _keyed("POST", _at(pool, "fork"), _POOL.validate_python, body, idempotency_key, wait=None if wait else "0")


def compact_pool(
    pool: PoolRef,
    *,
    tokens: Sequence[int] | None = None,
    prompt: str | None = None,
    messages: Messages | None = None,
    tools: Tools | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    keep_to: int | None = None,
    migrate: Sequence[str] | None = None,
    name: str | None = None,
    ttl_s: float | None = None,
) -> Call[r.CompactedPool]:
    """Put a shorter prompt in the place of a long one, in one call: new pool, sessions moved, old subtree goes with its last user.

    Not repeatable: after a lost answer look at the pools first.
    """
    body = _given(
        tokens=_listed(tokens), prompt=prompt, messages=_dicts(messages), tools=_dicts(tools), name=name, ttl_s=ttl_s,
        chat_template_kwargs=chat_template_kwargs, keep_to=keep_to, migrate=_listed(migrate),
    )  # fmt: skip
    return Call("POST", _at(pool, "compact"), r.CompactedPool.model_validate, body, repeatable=False)


def pools(*, depth: int | None = None) -> Call[r.PoolTree]:
    """All pools; `depth` levels of the tree at most."""
    return Call("GET", "/polykv/pools", r.PoolTree.model_validate, params=_texts(depth=depth))


def pool(pool: PoolRef, *, depth: int | None = None) -> Call[r.Pool]:
    """One pool and, in `subtree`, all below it."""
    return Call("GET", _at(pool), r.Pool.model_validate, params=_texts(depth=depth))


def release_pool(pool: PoolRef, *, recursive: bool = False, over_pins: bool = False) -> Call[r.Released]:
    """Forget a pool; with `recursive` all below it too, all or none."""
    return Call("DELETE", _at(pool), r.Released.model_validate, params=_texts(recursive=recursive, over_pins=over_pins))


def pin_pool(pool: PoolRef, *, owner: str | None = None, lease: float | Literal["none"] | None = None) -> Call[r.Pool]:
    """Keep a pool's KV for a lease (600 s unless given); again renews it."""
    return Call("POST", _at(pool, "pin"), _POOL.validate_python, _given(owner=owner, lease=lease))


def unpin_pool(pool: PoolRef, *, owner: str | None = None) -> Call[r.Pool]:
    """Take the pin away; with `owner` only if it is that owner's."""
    return Call("POST", _at(pool, "unpin"), _POOL.validate_python, _given(owner=owner))


def renew_pool(pool: PoolRef, *, ttl_s: float | None = None) -> Call[r.Pool]:
    """Count the time to live from now, also with a new length."""
    return Call("POST", _at(pool, "renew"), _POOL.validate_python, _given(ttl_s=ttl_s))


def evict_pool(pool: PoolRef) -> Call[r.Evicted]:
    """Drop the KV, keep the tokens: the next request brings it back."""
    return Call("POST", _at(pool, "evict"), r.Evicted.model_validate, {})


def flush_pool(pool: PoolRef) -> Call[r.Flushed]:
    """Evict what is idle of a subtree."""
    return Call("POST", _at(pool, "flush"), r.Flushed.model_validate, {})


def verify_pool(pool: PoolRef, *, n_positions: int | None = None, positions: Sequence[int] | None = None) -> Call[r.Verification]:
    """Hold a pool's KV against a computation without it. Wants the admin key."""
    body = _given(n_positions=n_positions, positions=_listed(positions))
    return Call("POST", _at(pool, "verify"), r.Verification.model_validate, body)


def pool_tokens(pool: PoolRef) -> Call[r.PoolTokens]:
    """A pool's prefix as ids."""
    return Call("GET", _at(pool, "tokens"), r.PoolTokens.model_validate)


def pool_text(pool: PoolRef) -> Call[r.PoolText]:
    """A pool's prefix as text."""
    return Call("GET", _at(pool, "text"), r.PoolText.model_validate)


def diff(a: PoolRef, b: PoolRef) -> Call[r.Diff]:
    """Where two pools part."""
    return Call("GET", "/polykv/diff", r.Diff.model_validate, params=_texts(a=a, b=b))


def match(body: Mapping[str, Any], *, route: str | None = None) -> Call[r.Match]:
    """What a request would share, without running it; also its exact number of prompt tokens."""
    return Call("POST", "/polykv/match", r.Match.model_validate, dict(body), _texts(route=route))


def sessions() -> Call[r.Sessions]:
    """All sessions, and running requests without one."""
    return Call("GET", "/polykv/sessions", r.Sessions.model_validate)


def session(session_id: str) -> Call[r.Session]:
    """One session."""
    return Call("GET", f"/polykv/sessions/{quote(session_id, safe='')}", r.Session.model_validate)


def end_session(session_id: str) -> Call[r.EndedSession]:
    """Cancel a session's request and free its cells; by query, which holds every id that there can be."""
    return Call("DELETE", "/polykv/sessions", r.EndedSession.model_validate, params={"session_id": session_id})


def capacity(pool: PoolRef | None = None, *, expected_tokens: int | None = None, session_id: str | None = None) -> Call[r.Capacity]:
    """May one more session start, of this pool or of none, with so many tokens of its own?"""
    path = "/polykv/capacity" if pool is None else _at(pool, "capacity")
    return Call("GET", path, r.Capacity.model_validate, params=_texts(expected_tokens=expected_tokens, session_id=session_id))


def admission(pool: PoolRef | None = None) -> Call[r.Admission]:
    """The policy of a pool, or the default policy."""
    return Call("GET", _admission(pool), r.Admission.model_validate)


def set_admission(pool: PoolRef | None = None, **policy: object) -> Call[r.Admission]:
    """Set a policy: `target_tps_per_session`, `mode`, `on_saturation`, `guarantee_min_sessions`, `settle_tokens` and what else the
    proxy knows.
    """
    return Call("POST", _admission(pool), r.Admission.model_validate, _given(**policy))


def clear_admission(pool: PoolRef | None = None) -> Call[r.Admission]:
    """Take the policy away."""
    return Call("DELETE", _admission(pool), r.Admission.model_validate)


def decisions(*, limit: int | None = None) -> Call[r.Decisions]:
    """What admission decided last."""
    return Call("GET", "/polykv/decisions", r.Decisions.model_validate, params=_texts(limit=limit))


def tps_now(*, running: bool = False) -> Call[r.Tps]:
    """Speeds at this moment."""
    return Call("GET", "/polykv/tps", r.Tps.model_validate, params=_texts(once=1, running=running))


def savings(*, days: int | None = None) -> Call[r.Savings]:
    """What pools spared."""
    return Call("GET", "/polykv/savings", r.Savings.model_validate, params=_texts(days=days))


def health() -> Call[r.Health]:
    """The engine's state, and whether there are pools."""
    return Call("GET", "/polykv/health", r.Health.model_validate)


def tokenize(content: str, *, add_special: bool = True, parse_special: bool = True) -> Call[list[int]]:
    """Token ids of a text. For the text after a pool's own, `add_special=False`: one begin token is enough."""
    body = {"content": content, "add_special": add_special, "parse_special": parse_special}
    return Call("POST", "/tokenize", lambda answer: r.Tokens.model_validate(answer).tokens, body)


def detokenize(tokens: Sequence[int]) -> Call[str]:
    """The text of token ids."""
    return Call("POST", "/detokenize", lambda answer: r.Text.model_validate(answer).content, {"tokens": list(tokens)})


def render(body: Mapping[str, Any]) -> Call[str]:
    """The prompt of a chat request, by the model's template."""
    return Call("POST", "/apply-template", lambda answer: str(answer["prompt"]), dict(body))


def count_tokens(body: Mapping[str, Any]) -> Call[int]:
    """How many tokens the prompt of a request has, exactly, without running it."""
    return Call("POST", "/polykv/match", lambda answer: r.Match.model_validate(answer).prompts[0].n_prompt, dict(body))


def _admission(pool: PoolRef | None) -> str:
    return "/polykv/admission" if pool is None else _at(pool, "admission")


def _listed(values: Sequence[T] | None) -> list[T] | None:
    return None if values is None else list(values)


def _dicts(values: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    return None if values is None else [dict(value) for value in values]
