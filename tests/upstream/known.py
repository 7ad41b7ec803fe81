"""Tests of upstream's that end otherwise through the proxy, and why that is right. docs/exactness.md has the same list."""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "test_basic.py::test_server_multiple_addresses": "the proxy listens at one address",
}
"""By name without the folder, as in `test_basic.py::test_server_slots`."""
