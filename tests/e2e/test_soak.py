"""The soak of `scripts/soak`, for as long as a test run has time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import soak_engines
from tests.e2e.soak import N_CROWD, Soak
from tests.lengths import length

pytestmark = pytest.mark.engine


def test_five_hundred_clients_and_many_watchers_leave_nothing_behind(engine_path: Path, tmp_path: Path) -> None:
    """Right answers to all, flat memory and files, every watcher served, and nobody holds anything in the end."""
    with soak_engines.real(engine_path, tmp_path) as (proxy, engine_pid):
        outcome = Soak(proxy, engine_pid, length(60, 120), N_CROWD).run()
    print(outcome.crowd.told(), outcome.pulse.told(), sep="\n")
    assert outcome.counts["brief", 200] > 0
    assert min(outcome.seen.values()) > 0
    assert {"pooled", "pooled_stream", "plain", "plain_stream", "session", "leave", "oversized", "malformed"} <= {
        what for what, _ in outcome.crowd.counts
    }
