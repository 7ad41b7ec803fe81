"""The fake engine's share of a device.

Law: what a test put there is what it says; a weight is taken where it shares anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.fake_records import EngineFaultError

if TYPE_CHECKING:
    from tests.fakes.fake_engine import FakeEngine


def set_weight(engine: FakeEngine, body: dict) -> dict[str, object]:
    """`POST gpu`."""
    weight = body.get("weight")
    if not isinstance(weight, int | float) or not 0.001 <= weight <= 1000:
        raise EngineFaultError(400, "invalid_request_error", "weight must be a number from 0.001 to 1000")
    if not engine.gpu_share["enabled"]:
        raise EngineFaultError(501, "gpu_share_off", f"GPU share is off: {engine.gpu_share['why']}")
    engine.gpu_share = {**engine.gpu_share, "weight": float(weight)}
    return engine.gpu_share
