"""The laws of sequences in files (docs/engine-protocol.md), on the fake engine and on the real one."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from polykv_proxy.core.pools import SeqRef
from polykv_proxy.errors import EngineRefusedError
from tests.contract.conftest import Peer

POOL = list(range(100, 140))


async def save(peer: Peer, seq: str, path: Path, start: int = 0) -> None:
    await peer.client.save_seq(SeqRef.parse(seq), path, start)


async def refused(peer: Peer, path: Path, parent: SeqRef | None = None) -> EngineRefusedError:
    before = (await peer.client.state()).seqs
    with pytest.raises(EngineRefusedError) as caught:
        await peer.client.restore_seq(path, parent)
    assert (await peer.client.state()).seqs == before, "a refusal takes no id"
    return caught.value


async def test_a_restored_sequence_is_the_one_that_was_saved(peer: Peer, tmp_path: Path) -> None:
    """Same tokens, same cells, a name of its own; the file is private, and there is no other."""
    made = await peer.make(POOL)
    used = (await peer.client.state()).cells.used
    await save(peer, made.seq, tmp_path / "a")
    assert [(path.name, stat.S_IMODE(path.stat().st_mode)) for path in tmp_path.iterdir() if path.is_file()] == [("a", 0o600)]
    await peer.client.free_seq(made.ref)
    back = await peer.client.restore_seq(tmp_path / "a", None)
    assert (back.seq != made.seq, back.n_tokens, back.n_shared) == (True, len(POOL), 0)
    state = await peer.client.state()
    assert (state.update >= back.update, state.cells.used, [seq.seq for seq in state.seqs]) == (True, used, [back.seq])
    assert (await peer.client.seq_tokens(back.ref)).tolist() == POOL
    reply = await peer.attach([*POOL, 7, 8], back.seq, len(POOL))
    assert int(reply.headers["x-polykv-shared"]) == len(POOL)


async def test_a_part_wants_the_parent_that_holds_what_comes_before(peer: Peer, tmp_path: Path) -> None:
    """The tokens before `from` are the parent's cells; without it, or on another, nothing is made."""
    parent = await peer.make(POOL)
    child = await peer.make([*POOL[:30], 5, 6, 7], parent_seq=parent.seq, branch_pos=30)
    other = await peer.make(list(range(200, 240)))
    used = (await peer.client.state()).cells.used
    await save(peer, child.seq, tmp_path / "child", 30)
    await peer.client.free_seq(child.ref)
    assert (await refused(peer, tmp_path / "child")).status == 400
    assert (await refused(peer, tmp_path / "child", other.ref)).kind == "file_refused"
    back = await peer.client.restore_seq(tmp_path / "child", parent.ref)
    assert (back.base, back.n_shared) == (parent.seq, 30)
    assert (back.n_tokens, (await peer.client.state()).cells.used) == (33, used)
    await peer.client.free_seq(parent.ref)
    gone = await refused(peer, tmp_path / "child", parent.ref)
    assert gone.kind == "file_refused"


async def test_a_file_that_is_not_right_is_refused(peer: Peer, tmp_path: Path) -> None:
    """Missing, empty, cut, longer and changed files are 409 `file_refused`."""
    made = await peer.make(POOL)
    await save(peer, made.seq, tmp_path / "good")
    await peer.client.free_seq(made.ref)
    data = (tmp_path / "good").read_bytes()
    changed = data[:60] + bytes([data[60] ^ 1]) + data[61:]
    for number, bad in enumerate([b"", data[:-1], data + b"x", changed]):
        (tmp_path / str(number)).write_bytes(bad)
        error = await refused(peer, tmp_path / str(number))
        assert (error.status, error.kind) == (409, "file_refused")
    assert (await refused(peer, tmp_path / "missing")).kind == "file_refused"
    assert (await refused(peer, Path("relative"))).status == 400


async def test_what_has_no_room_is_told_apart(peer: Peer, tmp_path: Path) -> None:
    """`no_seq_ids` when ids are out, `no_cells` when the cache is full; the file can be tried again."""
    long = [100 + n % 3000 for n in range(2500)]
    made = await peer.make(long)
    await save(peer, made.seq, tmp_path / "long")
    await peer.client.free_seq(made.ref)
    held = [await peer.make([5000 + n % 3000 for n in range(size)]) for size in (1200, 1201)]
    assert (await refused(peer, tmp_path / "long")).kind == "no_cells"
    held += [await peer.make([300 + n]) for n in range(2)]
    assert (await refused(peer, tmp_path / "long")).kind == "no_seq_ids"
    for one in held:
        await peer.client.free_seq(one.ref)
    assert (await peer.client.restore_seq(tmp_path / "long", None)).n_tokens == 2500


async def test_what_cannot_be_saved_leaves_no_file(peer: Peer, tmp_path: Path) -> None:
    """A sequence that is gone is 410, a place that cannot be written 507, a `from` without tokens 400."""
    made = await peer.make(POOL)
    found = []
    for seq, path, start in (("99.1", tmp_path / "a", 0), (made.seq, tmp_path / "no" / "a", 0), (made.seq, tmp_path / "a", 40)):
        with pytest.raises(EngineRefusedError) as caught:
            await save(peer, seq, path, start)
        found.append((caught.value.status, caught.value.kind))
    assert found == [(410, "stale_seq"), (507, "save_failed"), (400, "invalid_request_error")]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
