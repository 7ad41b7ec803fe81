"""Snapshots for tests: pools and sessions as the routes give them."""

from __future__ import annotations

from typing import Any

from polykv_proxy.ui.top.snapshot import Snapshot


def pool(number: int, parent: int | None = None, *, sessions: tuple[str, ...] = (), **more: object) -> dict[str, Any]:
    attached = [{"session_id": one, "state": "idle", "suffix_n_tokens": 3, "marginal_kv_bytes": 300} for one in sessions]
    facts = {"pool_id": number, "name": f"p{number}", "parent": parent, "branch_pos": 10 if parent else 0, "prefix_len": 30}
    kept = {"residency": "resident", "pinned": False, "own_kv_bytes": 1000 * number}
    return {**facts, **kept, "sessions": attached, **more}


def session(name: str | None, tps: float | None = None, *, pool_id: int | None = None, **more: object) -> dict[str, Any]:
    facts = {"session_id": name, "pool_id": pool_id, "state": "active" if tps is not None else "warming", "tps_ewma": tps}
    return {**facts, "ttft_ms": 120, "ctx_used": 40, "ctx_total": 4096, **more}


def snapshot(*pools: dict[str, Any], sessions: tuple[dict[str, Any], ...] = (), **more: Any) -> Snapshot:
    health = {"state": "ready", "pools": {"engine": {"kv": {"bytes_per_token": 100}}}}
    tree = {"pools": list(pools), "seq_ids_used": len(pools), "seq_ids_max": 16, "other_kv_bytes": 500}
    tps = {
        "aggregate_tps": 12.5,
        "mean_active_tps": 6.25,
        "n_active": 2,
        "n_warming": 0,
        "cells_total": 1000,
        "saved_tokens": 1234,
        "saved_s": 130.0,
        "sessions": list(sessions),
    }
    return Snapshot(**{"health": health, "tree": tree, "tps": tps, **more})


def savings(n_tokens: int, seconds: float, n_requests: int = 1, **misses: int) -> dict[str, Any]:
    """As `/polykv/savings` has it, and a pool in the listing; misses by reason."""
    missed = {reason: {"n_requests": n, "n_tokens": 10 * n, "seconds": 0.1 * n} for reason, n in misses.items()}
    return {"n_requests": n_requests, "n_tokens": n_tokens, "seconds": seconds, "misses": missed}
