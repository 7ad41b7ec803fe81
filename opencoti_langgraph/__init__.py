"""LangGraph on shared KV pools: a chat model, pool tools, a capacity gate, compaction and middleware for a polykv-proxy.

Law: importing the package imports nothing of LangChain; each name is loaded when it is first used, so that the clients alone cost
nothing else. Names of the `agents` extra say so when it is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from opencoti_langgraph._version import __version__

if TYPE_CHECKING:
    from opencoti_langgraph.async_client import AsyncPoolClient
    from opencoti_langgraph.backpressure import BackpressureMiddleware
    from opencoti_langgraph.chat_errors import (
        ChatConflictError,
        ChatPoolNotFoundError,
        ChatSaturatedError,
        ChatUnavailableError,
        ChatUnreachableError,
        OpencotiContextOverflowError,
        StreamCutError,
    )
    from opencoti_langgraph.chat_models import ChatOpencoti, OpencotiChatModel
    from opencoti_langgraph.client import PoolClient
    from opencoti_langgraph.compacting import Refork
    from opencoti_langgraph.compaction import CompactionNode, CompactionState, Trigger
    from opencoti_langgraph.compaction_middleware import CompactionMiddleware
    from opencoti_langgraph.errors import (
        ContextExceededError,
        GateClosedError,
        OpencotiError,
        PoolApiError,
        PoolConflictError,
        PoolNotFoundError,
        PoolSaturatedError,
        PoolUnavailableError,
        PoolUnsupportedError,
        ProxyUnreachableError,
        SessionNotFoundError,
    )
    from opencoti_langgraph.gate import add_capacity_gate, aresume_when_free, capacity_gate, resume_when_free
    from opencoti_langgraph.keeper import PoolKeeper
    from opencoti_langgraph.limiter import PoolAdmissionLimiter
    from opencoti_langgraph.pool_middleware import PoolMiddleware
    from opencoti_langgraph.prefix import late_context
    from opencoti_langgraph.room import Patience, startable
    from opencoti_langgraph.state import PoolState, latest, newest, report_of, report_of_reply, route_on_headroom
    from opencoti_langgraph.tools import make_pool_tools

_NAMES = {
    "async_client": ("AsyncPoolClient",),
    "chat_errors": (
        "ChatConflictError",
        "ChatPoolNotFoundError",
        "ChatSaturatedError",
        "ChatUnavailableError",
        "ChatUnreachableError",
        "OpencotiContextOverflowError",
        "StreamCutError",
    ),
    "chat_models": ("ChatOpencoti", "OpencotiChatModel"),
    "client": ("PoolClient",),
    "compacting": ("Refork",),
    "errors": (
        "ContextExceededError",
        "GateClosedError",
        "OpencotiError",
        "PoolApiError",
        "PoolConflictError",
        "PoolNotFoundError",
        "PoolSaturatedError",
        "PoolUnavailableError",
        "PoolUnsupportedError",
        "ProxyUnreachableError",
        "SessionNotFoundError",
    ),
    "gate": (
        "add_capacity_gate",
        "aresume_when_free",
        "capacity_gate",
        "resume_when_free",
    ),
    "limiter": ("PoolAdmissionLimiter",),
    "room": (
        "Patience",
        "startable",
    ),
    "state": (
        "PoolState",
        "latest",
        "newest",
        "report_of",
        "report_of_reply",
        "route_on_headroom",
    ),
    "tools": ("make_pool_tools",),
    "backpressure": ("BackpressureMiddleware",),
    "compaction": (
        "CompactionNode",
        "CompactionState",
        "Trigger",
    ),
    "compaction_middleware": ("CompactionMiddleware",),
    "keeper": ("PoolKeeper",),
    "pool_middleware": ("PoolMiddleware",),
    "prefix": ("late_context",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AsyncPoolClient",
    "BackpressureMiddleware",
    "ChatConflictError",
    "ChatOpencoti",
    "ChatPoolNotFoundError",
    "ChatSaturatedError",
    "ChatUnavailableError",
    "ChatUnreachableError",
    "CompactionMiddleware",
    "CompactionNode",
    "CompactionState",
    "ContextExceededError",
    "GateClosedError",
    "OpencotiChatModel",
    "OpencotiContextOverflowError",
    "OpencotiError",
    "Patience",
    "PoolAdmissionLimiter",
    "PoolApiError",
    "PoolClient",
    "PoolConflictError",
    "PoolKeeper",
    "PoolMiddleware",
    "PoolNotFoundError",
    "PoolSaturatedError",
    "PoolState",
    "PoolUnavailableError",
    "PoolUnsupportedError",
    "ProxyUnreachableError",
    "Refork",
    "SessionNotFoundError",
    "StreamCutError",
    "Trigger",
    "__version__",
    "add_capacity_gate",
    "aresume_when_free",
    "capacity_gate",
    "late_context",
    "latest",
    "make_pool_tools",
    "newest",
    "report_of",
    "report_of_reply",
    "resume_when_free",
    "route_on_headroom",
    "startable",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:  # AttributeError: what `from … import` and `hasattr` expect
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "langchain":
            raise
        raise ModuleNotFoundError(f"{name} needs langchain; pip install 'opencoti-langgraph[agents]'", name=error.name) from error


def __dir__() -> list[str]:
    return __all__
