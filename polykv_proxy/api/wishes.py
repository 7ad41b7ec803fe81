"""From a request's headers and JSON body to what it wishes for.

Law: reads, never changes. Bytes that are no JSON object name nothing: the engine answers for them itself. A field of ours that
makes no sense is an ApiError 400 with the field's name; JSON too deep to be read is one where it may name something. Order:
`pool_id`, `x-pool-id`, `shared_pool_slot`, `model@POOL`, default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from polykv_proxy.api.scan import names_something
from polykv_proxy.api.wire import check_values
from polykv_proxy.core.attach import PoolSource, Wish
from polykv_proxy.core.pools import NAME_RULE, is_pool_number, valid_name
from polykv_proxy.core.request_ids import request_id_of, shown
from polykv_proxy.core.sessions import MAX_ID, valid_session_id
from polykv_proxy.errors import ApiError
from polykv_proxy.ports import Header

PoolKey = str | int
MAX_TASKS = 1024
_LIMITS = ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens")


def read_wish(headers: Sequence[Header], body: bytes, default_pool: str | None, known: Callable[[PoolKey], bool]) -> Wish:
    """The wish of one request. `known` tells whether a pool of that id or name is there."""
    check_values(body)
    fields = _object(body)
    pool, source = _pool(headers, fields, default_pool, known)
    explicit = _explicit(fields, pool is not None)
    if pool is not None and fields.get("id_slot") not in (None, -1):
        raise _bad("id_slot", "id_slot pins a slot and cannot be combined with a pool; leave it out or do not name a pool")
    return Wish(
        pool=pool,
        source=source,
        explicit_p=explicit,
        session_id=_session(headers, fields),
        n_tasks=_n_tasks(fields),
        max_tokens=_max_tokens(fields),
        overcommit=_overcommit(fields),
        stream=fields.get("stream") is True,
        request_id=shown(request_id_of(headers)),
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except ValueError:
        return {}
    except RecursionError as error:
        if not names_something(frozenset(), body):
            return {}
        message = (
            "the body is nested too deeply to see which pool or session it names; name them by x-pool-id and x-session-id alone"
        )
        raise ApiError("invalid_request", message) from error
    return parsed if isinstance(parsed, dict) else {}


def _pool(
    headers: Sequence[Header], fields: dict[str, Any], default_pool: str | None, known: Callable[[PoolKey], bool]
) -> tuple[PoolKey | None, PoolSource]:
    in_body = _pool_key(fields.get("pool_id"), "pool_id")
    in_header = _pool_key(_header(headers, b"x-pool-id"), "x-pool-id")
    legacy = _legacy(fields.get("shared_pool_slot"))
    if in_body is not None and in_header is not None and in_body != in_header:
        raise _bad(
            "pool_id", f"pool_id in the body is {in_body!r}, the x-pool-id header says {in_header!r}; send one of them, or the same"
        )
    named = in_body if in_body is not None else in_header
    if named is not None and legacy is not None and named != legacy:
        field = "pool_id" if in_body is not None else "x-pool-id"
        raise _bad(
            "shared_pool_slot",
            f"{field} is {named!r} and shared_pool_slot is {legacy!r}; shared_pool_slot is an old name of pool_id",
        )
    if named is not None:
        return named, PoolSource.BODY if in_body is not None else PoolSource.HEADER
    if legacy is not None:
        return legacy, PoolSource.LEGACY
    suffix = _model_suffix(fields.get("model"))
    if suffix is not None and known(suffix):
        return suffix, PoolSource.MODEL
    if default_pool is not None and known(default_pool):
        return default_pool, PoolSource.DEFAULT
    return None, PoolSource.BODY


def _pool_key(value: object, field: str) -> PoolKey | None:
    """An id or a name, ids as integers."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and is_pool_number(value):
        return int(value)
    if isinstance(value, str) and valid_name(value):
        return value
    raise _bad(
        field, f"{field} must be a pool id (an integer, or its digits as a string) or a pool name ({NAME_RULE}), not {value!r:.80}"
    )


def _legacy(value: object) -> PoolKey | None:
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        return None
    return _pool_key(value, "shared_pool_slot")


def _model_suffix(model: object) -> PoolKey | None:
    if not isinstance(model, str) or "@" not in model:
        return None
    suffix = model.rpartition("@")[2]
    if is_pool_number(suffix):
        return int(suffix)
    return suffix if valid_name(suffix) else None


def _explicit(fields: dict[str, Any], has_pool: bool) -> int | None:
    value = fields.get("shared_prefix_n_tokens")
    if value is None:
        return None
    field = "shared_prefix_n_tokens"
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _bad(field, f"{field} must be an integer of at least 0, not {value!r:.80}; leave it out to share as much as agrees")
    if not has_pool and fields.get("shared_pool_slot") is None:
        raise _bad(field, f"{field} says how much of a pool to share, but the request names no pool; add pool_id")
    return value


def _session(headers: Sequence[Header], fields: dict[str, Any]) -> str | None:
    in_body = fields.get("session_id")
    in_header = _header(headers, b"x-session-id")
    if in_body is not None and not isinstance(in_body, str):
        raise _bad("session_id", f"session_id must be a string, not {in_body!r:.80}")
    for field, value in (("session_id", in_body), ("x-session-id", in_header)):
        if value is not None and not valid_session_id(value):
            raise _bad(field, f"{field} must be 1 to {MAX_ID} printable ASCII characters")
    if in_body is not None and in_header is not None and in_body != in_header:
        raise _bad(
            "session_id",
            f"session_id in the body is {in_body!r}, the x-session-id header says {in_header!r}; send one, or the same",
        )
    return in_body if in_body is not None else in_header


def _header(headers: Sequence[Header], name: bytes) -> str | None:
    """The value of a header of ours; ApiError 400 when it comes twice with different values."""
    values = {value.strip() for field, value in headers if field.lower() == name}
    if len(values) > 1:
        raise _bad(name.decode(), f"the {name.decode()} header came {len(values)} times with different values; send one")
    return values.pop().decode("latin-1") if values else None


def _n_tasks(fields: dict[str, Any]) -> int:
    """How many tasks the engine makes of it: completions asked for, times prompts given."""
    prompt = fields.get("prompt")
    prompts = 1
    if isinstance(prompt, list):
        kinds = set(map(type, prompt))  # one pass in C: there can be thousands of token ids
        if kinds & {str, list, dict} and not kinds & {int, bool}:
            prompts = len(prompt)
    n = fields.get("n_cmpl", fields.get("n"))
    copies = n if isinstance(n, int) and not isinstance(n, bool) and n > 1 else 1
    return min(MAX_TASKS, max(1, prompts * copies))


def _max_tokens(fields: dict[str, Any]) -> int | None:
    """The limit of an answer, by any of its names; the engine takes a negative one for none."""
    for name in _LIMITS:
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value if value >= 0 else None
    return None


def _overcommit(fields: dict[str, Any]) -> bool:
    value = fields.get("overcommit")
    if value is not None and not isinstance(value, bool):
        raise _bad("overcommit", f"overcommit must be true or false, not {value!r:.80}")
    return bool(value)


def _bad(field: str, message: str) -> ApiError:
    return ApiError("invalid_request", message, param=field)
