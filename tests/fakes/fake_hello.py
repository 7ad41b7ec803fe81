"""What the fake engine says of itself.

Law: facts of the moment; changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.fake_owners import BYTES_PER_CELL
from tests.fakes.toy_tokens import N_VOCAB

if TYPE_CHECKING:
    from tests.fakes.fake_engine import FakeEngine


def hello_of(engine: FakeEngine) -> dict:
    """`GET hello`."""
    return {
        "protocol": {"major": engine.major, "minor": 0},
        "boot_id": engine.boot_id,
        "phase": "ready",
        "model": {
            "fingerprint": engine.fingerprint,
            "name": "toy",
            "arch": "toy",
            "n_vocab": N_VOCAB,
            "size_bytes": 2,
            "n_params": 1,
        },
        "n_slots": engine.n_slots,
        "n_ctx": engine.n_ctx,
        "n_ctx_slot": engine.n_ctx,
        "max_pools": engine.max_pools,
        "n_seq_max": engine.n_slots + engine.max_pools,
        "pools_price_bytes": 0,
        "kv": {
            "unified": engine.n_streams == 1,
            "streams": engine.n_streams,
            "cells": engine.n_ctx * engine.n_streams,
            "bytes_per_token": BYTES_PER_CELL,
        },
        "prefix_sharing": engine.prefix_sharing,
        "prefix_sharing_why": "a toy",
        "context_shift": False,
        "cache_reuse": 0,
        "speculative": False,
    }
