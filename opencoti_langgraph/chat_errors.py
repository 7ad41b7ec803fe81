"""What goes wrong in a chat, as errors that LangChain, the OpenAI SDK and our clients all know.

Law: each class is one of ours and one of langchain-openai's, so `except PoolSaturatedError`, `except openai.RateLimitError` and
LangChain's `ModelError.is_retryable` all work. An error event in the middle of a stream is the error that a plain answer would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai
from langchain_core.exceptions import ModelConnectionError
from langchain_openai.chat_models.base import (
    OpenAIAPIError,
    OpenAIConnectionError,
    OpenAIContextOverflowError,
    OpenAIModelNotFoundError,
    OpenAIRateLimitError,
)

from opencoti_langgraph.errors import (
    ContextExceededError,
    OpencotiError,
    PoolApiError,
    PoolConflictError,
    PoolNotFoundError,
    PoolSaturatedError,
    PoolUnavailableError,
    ProxyUnreachableError,
    kind_of,
)
from opencoti_langgraph.transport import httpx_of_sdk
from opencoti_langgraph.wire import unreachable


class _ChatError(PoolApiError):
    """Made as the SDK makes its errors: of a response and the error object in it."""

    def __init__(self, message: str, *, response: Any, body: object | None = None) -> None:
        openai.APIStatusError.__init__(self, message, response=response, body=body)  # type: ignore[arg-type] # subclasses are one
        self.message = message
        self.note(response.status_code, _details(body, response.headers))


class ChatSaturatedError(_ChatError, PoolSaturatedError, OpenAIRateLimitError):
    """429: wait `retry_after` seconds, then try again."""


class OpencotiContextOverflowError(_ChatError, ContextExceededError, OpenAIContextOverflowError):
    """The prompt is longer than the context. Summarising middleware recovers from it."""


class ChatPoolNotFoundError(_ChatError, PoolNotFoundError, OpenAIModelNotFoundError):
    """The pool that the request named is not there (any more)."""


class ChatConflictError(_ChatError, PoolConflictError, openai.ConflictError):
    """409: the pool is being released, or does not begin as the request says."""


class ChatUnavailableError(_ChatError, PoolUnavailableError, OpenAIAPIError):
    """The engine is starting, gone or standing still."""


class ChatUnreachableError(ProxyUnreachableError, OpenAIConnectionError):
    """Nobody answered; the message says where."""


class StreamCutError(OpencotiError, ModelConnectionError):
    """A stream ended before the engine had finished: what came is not the whole answer."""


_KINDS: Mapping[type[PoolApiError], tuple[type[_ChatError], int]] = {
    PoolSaturatedError: (ChatSaturatedError, 429),
    ContextExceededError: (OpencotiContextOverflowError, 400),
    PoolNotFoundError: (ChatPoolNotFoundError, 404),
    PoolConflictError: (ChatConflictError, 409),
    PoolUnavailableError: (ChatUnavailableError, 503),
}


def typed(error: openai.APIError) -> Exception:
    """The same error in one of our classes, or itself where none fits."""
    if isinstance(error, openai.APIConnectionError) and not isinstance(error, openai.APITimeoutError):
        url = error.request.url
        return ChatUnreachableError(
            message=unreachable(f"{url.scheme}://{url.netloc.decode()}", _first(error)), request=error.request
        )
    response = getattr(error, "response", None)
    status = None if response is None else response.status_code
    kind = kind_of(status, _details(error.body, {}))
    if kind not in _KINDS or (kind is PoolNotFoundError and _details(error.body, {}).get("code") != "pool_not_found"):
        return error  # a model that is not there is no pool
    made, usual = _KINDS[kind]
    if response is None:
        response = httpx_of_sdk().Response(usual, request=error.request)
    return made(error.message, response=response, body=error.body)


def _first(error: BaseException) -> BaseException:
    """What an error was raised from, in the end."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _details(body: object, headers: Mapping[str, str]) -> dict[str, Any]:
    details = dict(body) if isinstance(body, Mapping) else {}
    if isinstance(inner := details.get("error"), Mapping):
        details = dict(inner)
    if headers.get("x-should-retry") == "false":
        details["should_retry"] = False
    wait = headers.get("retry-after")
    if wait is not None and wait.replace(".", "", 1).isdecimal():
        details.setdefault("retry_after", float(wait))
    return details
