"""The soak of `scripts/soak`, for as long as a test run has time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.soak import ARGS, soak
from tests.fakes.product import product
from tests.lengths import length
from tests.models import tiny_model

pytestmark = pytest.mark.engine


def test_mixed_traffic_and_many_watchers_leave_nothing_behind(engine_path: Path, tmp_path: Path) -> None:
    """Right answers, flat memory and files, every watcher served, and nobody holds anything in the end."""
    seconds = length(60, 120)
    with product(engine_path, tiny_model("full"), tmp_path, args=ARGS) as proxy:
        counts, seen = soak(proxy, seconds)
    assert counts["brief", 200] > 0
    assert min(seen.values()) > 0
