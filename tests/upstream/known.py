"""Tests of upstream's that end otherwise through the proxy, and why that is right. docs/exactness.md has the same list."""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "test_basic.py::test_server_multiple_addresses": "the proxy listens at one address",
    "test_metrics.py::test_metrics_disabled": "the page of metrics is always there",
    "test_sleep.py::test_server_sleep_read_only_endpoints": "the page of metrics has figures of ours, which move during sleep",
    "test_sleep.py::test_server_sleep_metrics_buckets": "asked for twice within a second, the page of metrics may be 0.2 s old",
    "test_completion.py::test_completion_unified": "with pools, a full cache stops one request early and fails none",
}
"""By name without folder and parameters, as in `test_basic.py::test_server_slots`."""
