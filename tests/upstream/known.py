"""Tests of upstream's that end otherwise through the proxy, and why that is right. docs/exactness.md has the same list."""

from __future__ import annotations

_AGE = "the page of metrics may be a fifth of a second old"

KNOWN: dict[str, str] = {
    "test_basic.py::test_server_multiple_addresses": "the proxy listens at one address",
    "test_metrics.py::test_metrics_disabled": "the page of metrics is always there",
    "test_metrics.py::test_metrics_prometheus_format": _AGE,
    "test_metrics.py::test_metrics_prompt_processed_and_cached": _AGE,
    "test_metrics.py::test_metrics_predicted_total_matches_requests": _AGE,
    "test_metrics.py::test_metrics_embedding_prompt_is_counted": _AGE,
    "test_sleep.py::test_server_sleep_read_only_endpoints": _AGE,
    "test_sleep.py::test_server_sleep_metrics_buckets": _AGE,
    "test_completion.py::test_completion_unified": "with pools, a full cache stops one request early and fails none",
}
"""By name without folder and parameters, as in `test_basic.py::test_server_slots`."""
