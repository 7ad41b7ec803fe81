"""Sessions, snapshots and whose cells they hold, on the fake engine and on the real one."""

from __future__ import annotations

import pytest

from polykv_proxy.engine.wire import Made
from polykv_proxy.errors import EngineRefusedError
from tests.contract.conftest import FIRST_REQ, Peer

POOL = list(range(100, 140))


async def test_a_session_finds_its_cells_again(peer: Peer) -> None:
    """The next turn of a session computes only what is new, and the state shows who holds the slot."""
    start = list(range(7000, 7030))
    await peer.complete(start, {"x-polykv-req": next(FIRST_REQ), "x-polykv-session": 501}, n_predict=1)
    await peer.complete(list(range(7500, 7530)), {"x-polykv-req": next(FIRST_REQ), "x-polykv-session": 502}, n_predict=1)
    reply = await peer.complete([*start, 7, 8], {"x-polykv-req": next(FIRST_REQ), "x-polykv-session": 501}, n_predict=1)
    assert int(reply.headers["x-polykv-cached"]) >= len(start)
    assert {501, 502} <= {slot.session for slot in (await peer.client.state()).slots}


async def test_an_ended_session_frees_its_cells(peer: Peer) -> None:
    """DELETE frees the session's cells at once; a second one, and an unknown session, free nothing."""
    await peer.complete(list(range(8000, 8030)), {"x-polykv-req": next(FIRST_REQ), "x-polykv-session": 601}, n_predict=1)
    before = (await peer.settled()).cells.used
    ended = await peer.client.end_session(601)
    after = await peer.client.state()
    assert ended.cells_freed >= 30
    assert after.cells.used == before - ended.cells_freed
    assert 601 not in {slot.session for slot in after.slots}
    assert (await peer.client.end_session(601)).cells_freed == 0


async def test_a_snapshot_is_what_the_session_holds(peer: Peer) -> None:
    """A session's tokens become a sequence without a new cell; an unknown session is refused."""
    start = list(range(9000, 9030))
    await peer.complete(start, {"x-polykv-req": next(FIRST_REQ), "x-polykv-session": 701}, n_predict=1)
    before = (await peer.settled()).cells.used
    steps = [step async for step in peer.client.make_seq({"session": 701, "n_tokens": 20})]
    made = steps[-1]
    assert isinstance(made, Made)
    assert (made.n_tokens, made.tokens) == (20, start[:20])
    assert (made.base, made.n_shared) == (None, 0)
    assert (await peer.client.state()).cells.used == before
    assert (await peer.client.seq_tokens(made.ref)).tolist() == start[:20]
    with pytest.raises(EngineRefusedError) as refused:
        async for _ in peer.client.make_seq({"session": 999_999}):
            pass
    assert refused.value.kind in {"session_not_found", "session_not_resident"}


async def test_cells_are_the_prefix_once_plus_the_suffixes(peer: Peer) -> None:
    """N sessions on one sequence use its cells once."""
    base = list(range(10_000, 10_050))
    await peer.clean()
    made = await peer.make(base)
    start = (await peer.client.state()).cells.used
    for n in range(3):
        headers = {"x-polykv-req": next(FIRST_REQ), "x-polykv-seq": made.seq, "x-polykv-shared": 50, "x-polykv-session": 800 + n}
        await peer.complete([*base, 20 + n, 21, 22], headers, n_predict=1)
    state = await peer.idle()
    slots = [slot for slot in state.slots if slot.session >= 800]
    private = sum(slot.n_tokens - slot.n_shared for slot in slots)
    grown = state.cells.used - start
    idle = sum(slot.n_tokens for slot in state.slots if not slot.session)
    assert [slot.n_shared for slot in slots] == [50, 50, 50]
    assert private - idle <= grown <= private


async def test_everything_in_use_is_owned_once(peer: Peer) -> None:
    """The oldest sequence that holds a cell owns it, else a slot; when the owner goes, the next one does."""
    await peer.clean()
    root = await peer.make(POOL)
    child = await peer.make([*POOL[:30], 5, 6, 7], parent_seq=root.seq, branch_pos=30)
    headers = {"x-polykv-req": next(FIRST_REQ), "x-polykv-seq": child.seq, "x-polykv-shared": 33, "x-polykv-session": 861}
    await peer.complete([*POOL[:30], 5, 6, 7, 8], headers, n_predict=1)

    async def owners() -> list[int]:
        state = await peer.idle()
        price = (await peer.client.hello()).kv.bytes_per_token
        holders = [*state.seqs, *state.slots]
        assert all(holder.own_bytes == holder.own_cells * price for holder in holders)
        assert sum(holder.own_cells for holder in holders) == state.cells.used
        assert sum(holder.own_bytes for holder in holders) + state.kv_bytes.other == state.kv_bytes.used < state.kv_bytes.total
        return [seq.own_cells for seq in state.seqs]

    assert await owners() == [40, 3]
    await peer.client.free_seq(root.ref)
    assert await owners() == [33]
    await peer.client.free_seq(child.ref)
    assert await owners() == []


async def test_a_second_turn_still_shares_the_sequence(peer: Peer) -> None:
    """A session whose slot holds the shared cells already goes on sharing them: they are reported, and only news is computed."""
    base = list(range(10_500, 10_540))
    made = await peer.make(base)
    for turn in ([*base, 5, 6], [*base, 5, 6, 7, 8]):
        headers = {"x-polykv-req": next(FIRST_REQ), "x-polykv-seq": made.seq, "x-polykv-shared": 40, "x-polykv-session": 880}
        reply = await peer.complete(turn, headers, n_predict=1)
        assert (reply.headers["x-polykv-shared"], "x-polykv-miss" in reply.headers) == ("40", False)
    assert reply.json()["timings"]["prompt_n"] <= 2


async def test_an_own_cache_that_is_longer_is_left_alone(peer: Peer) -> None:
    """Where the slot holds more of the prompt by itself, nothing is taken from the sequence and the reason says so."""
    base = list(range(10_600, 10_640))
    await peer.complete([*base, 5, 6], {"x-polykv-req": next(FIRST_REQ), "x-polykv-session": 890}, n_predict=1)
    made = await peer.make(base[:20])
    headers = {"x-polykv-req": next(FIRST_REQ), "x-polykv-seq": made.seq, "x-polykv-shared": 20, "x-polykv-session": 890}
    reply = await peer.complete([*base, 5, 6, 7], headers, n_predict=1)
    assert (reply.headers["x-polykv-shared"], reply.headers["x-polykv-miss"]) == ("0", "own_cache_longer")
    assert int(reply.headers["x-polykv-cached"]) >= 42


async def test_what_a_released_branch_left_is_not_shared_with_its_parent(peer: Peer) -> None:
    """The slot goes on from cells that it had of the branch: of the parent it has taken nothing, of the branch all that it held."""
    base = list(range(10_700, 10_740))
    root = await peer.make(base)
    branch = await peer.make([*base, 5, 6, 7], parent_seq=root.seq, branch_pos=40)

    async def turn(seq: str, shared: int, *more: int) -> tuple[str, str | None]:
        headers = {"x-polykv-req": next(FIRST_REQ), "x-polykv-seq": seq, "x-polykv-shared": shared, "x-polykv-session": 895}
        reply = await peer.complete([*base, 5, 6, 7, *more], headers, n_predict=1)
        assert int(reply.headers["x-polykv-cached"]) >= 42 + len(more)
        return reply.headers["x-polykv-shared"], reply.headers.get("x-polykv-miss")

    assert await turn(branch.seq, 43, 8) == ("43", None)
    await peer.client.free_seq(branch.ref)
    assert await turn(root.seq, 40, 8, 9) == ("0", "own_cache_longer")
    assert await turn(branch.seq, 43, 8, 9, 10) == ("43", None)
    (slot,) = [slot for slot in (await peer.idle()).slots if slot.session == 895]
    assert (slot.seq, slot.n_shared) == (branch.seq, 43)


async def test_a_snapshot_becomes_what_its_session_shares(peer: Peer) -> None:
    """After a snapshot the session's slot shares with it, and no cell was added."""
    reply = await peer.complete(list(range(15_000, 15_030)), {"x-polykv-req": next(FIRST_REQ), "x-polykv-session": 951})
    assert reply.status_code == 200
    before = (await peer.settled()).cells.used
    steps = [step async for step in peer.client.make_seq({"session": 951})]
    made = steps[-1]
    assert isinstance(made, Made)
    state = await peer.client.state()
    (slot,) = [slot for slot in state.slots if slot.session == 951]
    assert (slot.seq, slot.n_shared, state.cells.used) == (made.seq, made.n_tokens, before)


async def test_a_snapshot_says_whose_cells_it_begins_with(peer: Peer) -> None:
    """`base` and `n_shared` are what the session shared when it was taken: a sequence it attached to, then its last snapshot."""
    pool = await peer.make(POOL)
    headers = {"x-polykv-req": next(FIRST_REQ), "x-polykv-seq": pool.seq, "x-polykv-shared": 40, "x-polykv-session": 961}
    await peer.complete([*POOL, 5, 6, 7], headers)

    async def snapshot(**body: object) -> Made:
        made = [step async for step in peer.client.make_seq({"session": 961, **body})][-1]
        assert isinstance(made, Made)
        return made

    short, whole = await snapshot(n_tokens=30), await snapshot()
    assert [(made.base, made.n_shared) for made in (short, whole)] == [(pool.seq, 30), (pool.seq, 40)]
    again = await snapshot()
    assert (again.base, again.n_shared) == (whole.seq, whole.n_tokens)
