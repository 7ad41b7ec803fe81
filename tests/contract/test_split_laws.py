"""The laws of a split cache (docs/engine-protocol.md), on the fake engine and on the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from polykv_proxy.engine.wire import Made
from polykv_proxy.errors import EngineRefusedError
from tests.contract.conftest import FIRST_REQ, Peer

POOL = list(range(100, 140))


@pytest.fixture(scope="module")
def layout() -> str:
    return "--no-kv-unified"


async def used(peer: Peer) -> int:
    return (await peer.settled()).cells.used


async def test_hello_counts_streams_and_the_cells_of_all(peer: Peer) -> None:
    """A stream for each slot and each pool, each as large as the context of a slot."""
    hello = await peer.client.hello()
    assert (hello.kv.unified, hello.kv.streams, hello.prefix_sharing) == (False, hello.n_slots + hello.max_pools, "any")
    assert hello.kv.cells == hello.kv.streams * hello.n_ctx_slot == (await peer.client.state()).cells.total


async def test_what_is_taken_is_a_copy(peer: Peer) -> None:
    """A child, a request and a snapshot take what agrees and pay for it in cells; none of them has a base."""
    pool = await peer.make(POOL)
    start = await used(peer)
    child = await peer.make([*POOL[:30], 5, 6, 7], parent_seq=pool.seq, branch_pos=30)
    assert (child.base, child.n_shared, await used(peer) - start) == (None, 0, 33)
    headers = {"x-polykv-req": next(FIRST_REQ), "x-polykv-seq": pool.seq, "x-polykv-shared": 40, "x-polykv-session": 1001}
    reply = await peer.complete([*POOL, 5, 6, 7], headers)
    assert (reply.headers["x-polykv-shared"], reply.headers["x-polykv-cached"]) == ("40", "40")
    before = await used(peer)
    snapshot = [step async for step in peer.client.make_seq({"session": 1001})][-1]
    assert isinstance(snapshot, Made)
    assert (snapshot.base, snapshot.n_shared, await used(peer) - before) == (None, 0, snapshot.n_tokens)
    assert (await peer.client.seq_tokens(snapshot.ref)).tolist()[:43] == [*POOL, 5, 6, 7]


async def test_a_pool_that_goes_leaves_the_others(peer: Peer) -> None:
    """Its cells are free, and what was taken from it is still there."""
    pool = await peer.make(POOL)
    child = await peer.make([*POOL, 5], parent_seq=pool.seq, branch_pos=40)
    before = await used(peer)
    await peer.client.free_seq(pool.ref)
    assert await used(peer) == before - 40
    reply = await peer.attach([*POOL, 5, 6], child.seq, 41)
    assert reply.headers["x-polykv-shared"] == "41"


async def test_a_sequence_is_saved_as_a_whole(peer: Peer, tmp_path: Path) -> None:
    """A part is refused; the whole comes back without its parent, with as many cells."""
    pool = await peer.make(POOL)
    child = await peer.make([*POOL, 5, 6], parent_seq=pool.seq, branch_pos=40)
    with pytest.raises(EngineRefusedError) as part:
        await peer.client.save_seq(child.ref, tmp_path / "part", 40)
    assert part.value.status == 400
    await peer.client.save_seq(child.ref, tmp_path / "whole", 0)
    before = await used(peer)
    for ref in (child.ref, pool.ref):
        await peer.client.free_seq(ref)
    back = await peer.client.restore_seq(tmp_path / "whole", None)
    assert (back.n_tokens, back.base, await used(peer)) == (42, None, before - 40)
    reply = await peer.attach([*POOL, 5, 6, 7], back.seq, 42)
    assert reply.headers["x-polykv-shared"] == "42"
