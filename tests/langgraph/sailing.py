"""Tools for agents that do nothing but answer."""

from __future__ import annotations

from langchain_core.tools import tool


@tool
def dive(depth: int) -> str:
    """Go down."""
    return f"at {depth}"


@tool
def ascend(height: int) -> str:
    """Go up."""
    return f"at {height}"
