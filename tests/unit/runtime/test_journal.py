"""Mirrors runtime/journal.py."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from polykv_proxy.core.ledger import Placement
from polykv_proxy.core.pools import Pool, Residency, SavedCopy, SeqRef
from polykv_proxy.core.prefix import as_tokens, hash_prefix
from polykv_proxy.errors import JournalError, SettingsError
from polykv_proxy.runtime.journal import Journal, Recovered, Reply
from polykv_proxy.runtime.journal_schema import STEPS


def pool(pool_id: int, tokens: list[int], **more: object) -> Pool:
    array = as_tokens(tokens)
    return Pool(pool_id, array, hash_prefix(array), Residency.RESIDENT, "m", 1.0, 2.0, **more)  # type: ignore[arg-type]


async def reopened(path: Path, now: float = 100.0) -> Recovered:
    journal = Journal(path)
    try:
        return await journal.open(now)
    finally:
        await journal.close()


async def test_pools_come_back_whole_from_their_own_tokens(tmp_path: Path) -> None:
    """A child stores only what its parent lacks and comes back with its full prefix; placements come along."""
    path = tmp_path / "j"
    journal = Journal(path)
    await journal.open(0)
    place = Placement("b1", SeqRef(4, 2), 3)
    await journal.save_pool(pool(1, [1, 2, 3], name="root", ttl_s=5.0), place)
    shares = Placement("b1", SeqRef(5, 1), 4, SeqRef(4, 2), 2)
    await journal.save_pool(pool(2, [1, 2, 9, 9], parent=1, branch_pos=2), shares)
    await journal.close()
    (first, placed), (second, shared) = (await reopened(path)).pools
    assert (first.name, first.ttl_s, first.residency, placed) == ("root", 5.0, Residency.LOST, place)
    assert (second.tokens.tolist(), second.parent, second.branch_pos, shared) == ([1, 2, 9, 9], 1, 2, shares)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT length(own_tokens) FROM pools ORDER BY pool_id").fetchall() == [(12,), (8,)]
    db.close()


async def test_copies_and_last_uses_come_back(tmp_path: Path) -> None:
    """A row says how large the file is and where it starts; uses are written for all at once, and only where there is a row."""
    path = tmp_path / "j"
    journal = Journal(path)
    await journal.open(0)
    await journal.save_pool(pool(1, [1, 2, 3], copy=SavedCopy(77, 0)), None)
    await journal.save_pool(pool(2, [1, 2, 9], parent=1, branch_pos=2), None)
    await journal.update_pool(pool(2, [1, 2, 9], parent=1, branch_pos=2, copy=SavedCopy(5, 2)), None)
    await journal.save_pool(pool(1, [1, 2, 3], copy=None), None)
    await journal.save_uses([replace(pool(n, [1]), detached_ts=50.0 + n) for n in (1, 2, 3)])
    await journal.close()
    found = [(one.copy, one.last_used_ts) for one, _ in (await reopened(path)).pools]
    assert found == [(None, 51.0), (SavedCopy(5, 2), 52.0)]


async def test_a_child_without_its_parent_goes_alone(tmp_path: Path) -> None:
    """A pool whose parent's tokens are not there is forgotten, with all below it; the others come back."""
    path = tmp_path / "j"
    journal = Journal(path)
    await journal.open(0)
    for pool_id, tokens, parent in ((1, [1, 2], None), (2, [1, 2, 3], 1), (3, [1, 2, 3, 4], 2), (4, [1, 5], 1)):
        await journal.save_pool(pool(pool_id, tokens, parent=parent, branch_pos=len(tokens) - 1 if parent else 0), None)
    await journal.drop_pools([2])
    await journal.close()
    assert [found.pool_id for found, _ in (await reopened(path)).pools] == [1, 4]
    assert [found.pool_id for found, _ in (await reopened(path)).pools] == [1, 4]


async def test_saving_again_moves_the_placement_and_never_the_prefix(tmp_path: Path) -> None:
    """A pool's tokens are written once."""
    journal = Journal(tmp_path / "j")
    await journal.open(0)
    await journal.save_pool(pool(1, [1, 2, 3]), Placement("b1", SeqRef(4, 2), 3))
    await journal.save_pool(pool(1, [7, 7, 7]), None)
    await journal.close()
    ((found, placement),) = (await reopened(tmp_path / "j")).pools
    assert (found.tokens.tolist(), placement) == ([1, 2, 3], None)


async def test_ids_and_runs_only_grow(tmp_path: Path) -> None:
    """Reserved ids survive, also when a smaller one is reserved later; every start has a number of its own."""
    path = tmp_path / "j"
    journal = Journal(path)
    first = await journal.open(0)
    await journal.reserve_pool_id(7)
    await journal.reserve_pool_id(3)
    await journal.close()
    second = await reopened(path)
    third = await reopened(path)
    assert second.next_pool_id == 8
    assert len({first.run, second.run, third.run}) == 3


async def test_a_pool_and_its_answer_are_one_transaction(tmp_path: Path) -> None:
    """When the answer cannot be written, the pool is not there either."""
    path = tmp_path / "j"
    journal = Journal(path)
    await journal.open(0)
    bad = Reply("k", "h", 201, None, 0.0)  # type: ignore[arg-type]
    with pytest.raises(JournalError, match="nothing was changed"):
        await journal.save_pool(pool(1, [1]), None, bad)
    await journal.close()
    assert (await reopened(path)).pools == ()


async def test_answers_live_for_a_day(tmp_path: Path) -> None:
    """An answer older than a day is gone after a start."""
    path = tmp_path / "j"
    journal = Journal(path)
    await journal.open(0)
    for key, ts in (("old", 0.0), ("new", 50_000.0)):
        await journal.save_pool(pool(1, [1]), None, Reply(key, "h", 201, "{}", ts))
    await journal.close()
    assert [reply.key for reply in (await reopened(path, 90_000.0)).replies] == ["new"]


async def test_an_older_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    """An empty database has seen no step and gets them all."""
    path = tmp_path / "j"
    sqlite3.connect(path).close()
    await reopened(path)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(STEPS),)
    db.close()


async def test_a_journal_of_the_first_schema_is_read_whole(tmp_path: Path) -> None:
    """Pools written before a step are there after it, with the step's defaults."""
    path = tmp_path / "j"
    with sqlite3.connect(path) as db:
        db.executescript(f"{STEPS[0]} PRAGMA user_version = 1;")
        own = as_tokens([1, 2, 3])
        row = (1, "old", None, 0, own.tobytes(), hash_prefix(own).hex, "m", "tokens", None, 1.0, 2.0, "b1", "4.1", 3)
        db.execute(f"INSERT INTO pools VALUES ({', '.join('?' * len(row))})", row)
    db.close()
    ((found, placement),) = (await reopened(path)).pools
    assert (found.name, found.tokens.tolist(), placement) == ("old", [1, 2, 3], Placement("b1", SeqRef(4, 1), 3))


async def test_a_file_that_cannot_be_opened_is_not_damage(tmp_path: Path) -> None:
    """A path that is a folder is refused with the remedy, not moved aside."""
    (tmp_path / "j").mkdir()
    journal = Journal(tmp_path / "j")
    with pytest.raises(SettingsError, match="--state-dir"):
        await journal.open(0)
    await journal.close()
    assert [path.name for path in tmp_path.iterdir()] == ["j"]


async def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    """SQLite's own "full" is a JournalError; the journal goes on when there is room again."""
    path = tmp_path / "j"
    journal = Journal(path)
    await journal.open(0)
    await journal._in_worker(lambda: journal._db.execute("PRAGMA max_page_count = 12"))  # type: ignore[union-attr]
    with pytest.raises(JournalError, match="full"):
        await journal.save_pool(pool(1, list(range(100_000))), None)
    await journal.save_pool(pool(2, [1, 2]), None)
    await journal.close()
    assert [found.pool_id for found, _ in (await reopened(path)).pools] == [2]
