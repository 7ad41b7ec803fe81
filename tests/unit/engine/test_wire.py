"""Mirrors engine/wire.py: what is read out of what the engine says of itself."""

import pytest

from polykv_proxy.engine.wire import ModelFacts

N_PARAMS = 1_000_000


@pytest.mark.parametrize(("bits", "quantised"), [(0, False), (4.5, True), (8.5, True), (16, False), (16.3, False), (32, False)])
def test_weights_of_less_than_16_bits_are_quantised(bits: float, quantised: bool) -> None:
    """By size and number of parameters; an engine that does not tell them has whole weights."""
    assert ModelFacts(fingerprint="f", size_bytes=round(bits * N_PARAMS / 8), n_params=N_PARAMS).quantised is quantised
