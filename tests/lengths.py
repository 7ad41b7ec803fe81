"""How long a test runs: short in `scripts/test`, as the field case asks in `scripts/e2e`, which sets POLYKV_FULL_CASES."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")


def length(short: T, full: T) -> T:
    """`short`, or `full` where cases run at full length."""
    return full if os.environ.get("POLYKV_FULL_CASES") else short


def examples(short: int) -> int:
    """How many random cases: `short`, or POLYKV_FUZZ_EXAMPLES."""
    return int(os.environ.get("POLYKV_FUZZ_EXAMPLES") or short)
