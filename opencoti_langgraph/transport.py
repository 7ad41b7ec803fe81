"""Connections of the OpenAI SDK that belong to the event loop which opened them.

Law: langchain-openai keeps one async HTTP client for the whole process; a second event loop would meet connections of a closed one.
Here each loop has its own. Works with the SDK's `httpx2` (from 3.0 on) and `httpx` (before).
"""

from __future__ import annotations

import importlib
from typing import Any

import openai

from opencoti_langgraph.loops import PerLoop

KEEPALIVE_S = 30.0
MAX_CONNECTIONS = 1000


def httpx_of_sdk() -> Any:
    """The HTTP library that the installed SDK is made of."""
    return importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.split(".")[0])


def per_loop_client() -> openai.DefaultAsyncHttpxClient:
    """An async HTTP client for the SDK that any number of event loops may use."""
    http = httpx_of_sdk()
    limits = http.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE_S)

    class LoopTransport(http.AsyncBaseTransport):  # type: ignore[misc, name-defined] # of one of two libraries, alike in this
        """Sends by the connections of the loop that runs."""

        def __init__(self) -> None:
            self._transports: PerLoop[Any] = PerLoop(lambda: http.AsyncHTTPTransport(limits=limits), lambda it: it.aclose())

        async def handle_async_request(self, request: Any) -> Any:
            return await (await self._transports.get()).handle_async_request(request)

        async def aclose(self) -> None:
            await self._transports.close()

    return openai.DefaultAsyncHttpxClient(transport=LoopTransport())
