"""The engine's own errors as answers to our callers.

Law: one table; an error type that is not in it is the engine's failure, not the caller's.
"""

from __future__ import annotations

from polykv_proxy.engine.wire import Hello
from polykv_proxy.errors import ApiError, EngineError, EngineRefusedError, EngineUnavailableError, JournalError, retry_after

_CODES = {
    "session_not_found": "session_not_found",
    "session_not_resident": "session_not_resident",
    "no_seq_ids": "pool_seqs_exhausted",
    "too_long": "cannot_fit",
    "memory_class": "pools_unsupported",
    "pools_off": "pools_unsupported",
    "gpu_share_off": "gpu_share_off",
    "invalid_request_error": "invalid_request",
}


def api_error(error: Exception, hello: Hello | None = None, *, n_resident: int = 0, grace_left_s: float | None = None) -> ApiError:
    """The ApiError that says this to a caller. `grace_left_s`: after so many seconds a pool can go that was in use just now."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, JournalError):
        return ApiError("journal_failed", str(error))
    if isinstance(error, EngineUnavailableError):
        return ApiError("engine_unavailable", str(error), retry_after_s=2)
    if isinstance(error, EngineRefusedError):
        return _refusal(error, hello, n_resident, grace_left_s)
    if isinstance(error, EngineError):
        return ApiError("engine_protocol", str(error))
    return ApiError("internal_error", f"{type(error).__name__}: {error}")


def _refusal(error: EngineRefusedError, hello: Hello | None, n_resident: int, grace_left_s: float | None) -> ApiError:
    code = _CODES.get(error.kind)
    if code == "pool_seqs_exhausted":
        limit = hello.max_pools if hello else 0
        soon = f"wait {retry_after(grace_left_s)} s (--pool-grace-s after the last use of one), " if grace_left_s else ""
        making = " (the others are being made or given up)" if n_resident < limit else ""
        message = (
            f"{n_resident} of {limit} pools are resident{making} and none can go by itself: {soon}"
            "release one, or start with a larger --max-pools"
        )
        return ApiError(code, message, retry_after_s=grace_left_s or 5, extra={"seq_ids_used": limit, "seq_ids_max": limit})
    if code is not None:
        return ApiError(code, error.message, param=error.param)
    if error.status == 503:
        return ApiError("engine_starting", error.message, retry_after_s=1)
    return ApiError("engine_protocol", f"the engine answered {error.status} {error.kind}: {error.message}".strip())
