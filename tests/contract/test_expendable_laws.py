"""The laws of expendable sequences in docs/engine-protocol.md, on the fake engine and on the real one."""

from __future__ import annotations

import asyncio

import pytest

from polykv_proxy.core.events import SeqGivenUp
from polykv_proxy.core.pools import SeqRef
from polykv_proxy.engine.wire import Made
from polykv_proxy.errors import EngineRefusedError
from tests.contract.conftest import HANG_GUARD_S, Peer


async def full(peer: Peer) -> list[Made]:
    """Three sequences of 1,100 tokens each in an engine of 4,096 cells."""
    return [await peer.make([5000 + 10 * n, *range(300, 1399)]) for n in range(3)]


async def ask(peer: Peer, n: int) -> int:
    """The status of a plain request of so many tokens."""
    return (await peer.complete([9000, *range(2000, 1999 + n)])).status_code


async def held(peer: Peer) -> list[str]:
    return sorted(seq.seq for seq in (await peer.client.state()).seqs)


async def test_expendable_sequences_go_in_order_when_cells_run_out_and_only_then(peer: Peer) -> None:
    """A request that fits takes none; one that does not takes the first of the list and is served; what is not listed stays."""
    first, second, third = await full(peer)
    await peer.client.set_expendable([second.ref, SeqRef(99, 1), first.ref])
    assert await ask(peer, 100) == 200
    assert len(await held(peer)) == 3
    assert await ask(peer, 1500) == 200
    assert await held(peer) == sorted([first.seq, third.seq])
    async with asyncio.timeout(HANG_GUARD_S):
        while not (given := [event for event in peer.events if isinstance(event, SeqGivenUp)]):
            await asyncio.sleep(0.01)
    assert given == [SeqGivenUp(second.ref)]
    assert await peer.client.free_seq(second.ref) is False
    await peer.client.set_expendable([])
    assert await ask(peer, 2500) != 200
    assert await held(peer) == sorted([first.seq, third.seq])


async def test_a_materialisation_takes_them_too(peer: Peer) -> None:
    """A sequence for which there are no cells is made in the place of an expendable one, and refused without one."""
    made = await full(peer)
    with pytest.raises(EngineRefusedError) as refused:
        await peer.make([7000, *range(300, 1399)])
    assert refused.value.kind == "too_long"
    await peer.client.set_expendable([made[0].ref])
    fourth = await peer.make([7000, *range(300, 1399)])
    assert await held(peer) == sorted([made[1].seq, made[2].seq, fourth.seq])


async def test_a_refused_materialisation_has_given_its_id_back(peer: Peer) -> None:
    """Whoever hears that there are no cells may ask for less at once, with the last id."""
    await full(peer)
    for _ in range(20):
        with pytest.raises(EngineRefusedError) as refused:
            await peer.make([7000, *range(300, 1399)])
        assert refused.value.kind == "too_long"
        made = await peer.make([7000, 7001])
        await peer.client.free_seq(made.ref)


async def test_a_list_of_something_else_is_refused(peer: Peer) -> None:
    """Words that are no sequences are 400, and the list before stays."""
    with pytest.raises(EngineRefusedError) as refused:
        await peer.client.set_expendable(["five"])  # type: ignore[list-item]
    assert (refused.value.status, refused.value.kind) == (400, "invalid_request_error")
