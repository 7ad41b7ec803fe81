"""A pool and its row in the journal: one becomes the other and back.

Law: pure. What is read is believed only when it can be: tokens by their hash, figures by their bounds.
"""

from __future__ import annotations

import math

import numpy as np

from polykv_proxy.core.ledger import Placement
from polykv_proxy.core.pools import Pin, Pool, Residency, SavedCopy, SeqRef
from polykv_proxy.core.prefix import Tokens, as_tokens, from_bytes, hash_prefix, to_bytes

MOST_POOLS = 1 << 53
"""Ids stay below this: they are numbers of JSON."""


def row_of(pool: Pool, placement: Placement | None) -> tuple[object, ...]:
    """A pool and where its KV was last seen, as they are written."""
    return (
        pool.pool_id,
        pool.name,
        pool.parent,
        pool.branch_pos,
        to_bytes(pool.own_tokens),
        pool.hashed.hex,
        pool.fingerprint,
        pool.source,
        pool.ttl_s,
        pool.created_ts,
        pool.last_used_ts,
        placement.boot_id if placement else None,
        str(placement.seq) if placement else None,
        placement.cells if placement else 0,
        str(placement.base) if placement and placement.base else None,
        placement.n_shared if placement else 0,
        *pin_row(pool),
        pool.copy.n_bytes if pool.copy else None,
        pool.copy.start if pool.copy else 0,
    )


def pin_row(pool: Pool) -> tuple[object, ...]:
    """Its pin alone."""
    return pool.pin is not None, pool.pin.owner if pool.pin else None, pool.pin.until_ts if pool.pin else None


def pool_of(row: tuple[object, ...], prefixes: dict[int, Tokens]) -> tuple[Pool, Placement | None]:
    """A pool as it was written; `prefixes` are the tokens of those above it. ValueError for a row that nobody wrote so."""
    pool_id, name, parent, branch_pos, own, prefix_hash, fingerprint, source, ttl_s, created, used, *rest = row
    if not isinstance(own, bytes):
        raise ValueError("its tokens are none")  # noqa: TRY004 - all damage is one
    tokens = from_bytes(own)
    if isinstance(parent, int):
        tokens = as_tokens(np.concatenate([prefixes[parent][: count_of(branch_pos)], tokens]))
    hashed = hash_prefix(tokens)
    if hashed.hex != prefix_hash:
        raise ValueError("its tokens do not match their hash")
    pool = Pool(
        pool_id=count_of(pool_id, MOST_POOLS),
        tokens=tokens,
        hashed=hashed,
        residency=Residency.LOST,
        fingerprint=str(fingerprint),
        created_ts=_figure(created),
        last_access_ts=_figure(used),
        name=None if name is None else str(name),
        parent=parent if isinstance(parent, int) else None,
        branch_pos=count_of(branch_pos),
        source=str(source),
        ttl_s=None if ttl_s is None else _figure(ttl_s),
        pin=_pin(*rest[5:8]),
        copy=None if rest[8] is None else SavedCopy(count_of(rest[8]), count_of(rest[9])),
    )
    return pool, _placement(*rest[:5])


def _pin(pinned: object, owner: object, until: object) -> Pin | None:
    if not pinned:
        return None
    return Pin(None if owner is None else str(owner), None if until is None else _figure(until))


def _placement(boot_id: object, seq: object, cells: object, base: object, n_shared: object) -> Placement | None:
    n_cells, n_taken = count_of(cells), count_of(n_shared)
    if seq is None or boot_id is None:
        return None
    shares = None if base is None else SeqRef.parse(str(base))
    return Placement(str(boot_id), SeqRef.parse(str(seq)), n_cells, shares, n_taken)


def count_of(value: object, limit: int = 1 << 62) -> int:
    """A whole number below the limit. ValueError for anything else."""
    if not isinstance(value, int) or not 0 <= value < limit:
        raise ValueError(f"{value!r} is no count")
    return value


def _figure(value: object) -> float:
    if not isinstance(value, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no figure")
    return value
