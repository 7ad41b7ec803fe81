"""What a client is told whose request goes nowhere: it is no HTTP, comes too slowly, or asks for what is not served.

Law: pure; words only. Who is told, and what becomes of the connection, is the protocol's business.
"""

from __future__ import annotations

from collections.abc import Iterable

from polykv_proxy.api.relay.heads import wants_upgrade
from polykv_proxy.errors import ApiError
from polykv_proxy.ports import Header, Refusal

NOT_FOUND = Refusal(
    404,
    b'{"error":{"message":"File Not Found","type":"not_found_error","code":404}}',
    [(b"Content-Type", b"application/json; charset=utf-8")],
)
"""The engine's own answer for a path that it does not know."""


def invalid(error: Exception) -> ApiError:
    """Bytes that are no HTTP, or that can be read in two ways."""
    return ApiError("invalid_request", f"The request is not valid HTTP: {error}.")


def head_too_large(limit: int) -> ApiError:
    """A head, a trailer or the framing of chunks beyond the limit."""
    return ApiError("header_too_large", f"The request head, or what is around its body, is larger than {limit} bytes.")


def too_slow(seconds: float) -> ApiError:
    """A request that was begun and does not come to its end."""
    return ApiError("request_timeout", f"The rest of the request did not come within {seconds:g} s.")


def too_many() -> ApiError:
    """One connection more than are taken."""
    return ApiError(
        "too_many_connections", "There are as many connections as this proxy takes (--max-connections).", retry_after_s=1
    )


def upgrade_refusal(method: bytes, headers: Iterable[Header]) -> ApiError | None:
    """Why a request has no plain HTTP answer: a websocket handshake, a tunnel. Other upgrades are offers, and declined."""
    if method == b"CONNECT":
        return ApiError("method_not_allowed", "CONNECT is not served here.")
    if wants_upgrade(headers) == b"websocket":
        return ApiError(
            "upgrade_refused", 'Websockets are not served here: send the same request by plain HTTP POST, with "stream": true.'
        )
    return None
