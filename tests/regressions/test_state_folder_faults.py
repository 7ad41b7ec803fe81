"""State folders that are deleted, full, foreign or damaged: a promise that cannot be kept is not given."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from polykv_proxy.errors import JournalError
from polykv_proxy.runtime.journal import Journal
from polykv_proxy.runtime.state_folder import StateFolder
from tests.integration.rig import rig


async def test_a_deleted_folder_is_no_place_for_promises(tmp_path: Path) -> None:
    """SQLite would write into the deleted file and lose it with the process: 507, and the engine holds nothing."""
    async with rig(tmp_path, state_dir=tmp_path / "state") as proxy:
        await proxy.pool(prompt="one")
        shutil.rmtree(tmp_path / "state")
        refused = await proxy.api.post("/polykv/pools", json={"prompt": "two", "name": "two"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "journal_failed")
        assert [pool["pool_id"] for pool in (await proxy.api.get("/polykv/pools")).json()["pools"]] == [1]
        assert (await proxy.api.delete("/polykv/pools/1")).status_code == 507


async def test_another_file_in_its_place_is_not_ours(tmp_path: Path) -> None:
    """A second journal under the same name is somebody else's."""
    journal = Journal(tmp_path / "j")
    await journal.open(0)
    (tmp_path / "j").rename(tmp_path / "old")
    (tmp_path / "j").touch()
    with pytest.raises(JournalError, match="replaced"):
        await journal.reserve_pool_id(1)
    await journal.close()


async def test_a_row_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    """Tokens that are no whole integers: the file is kept aside, the proxy starts."""
    journal = Journal(tmp_path / "j")
    await journal.open(0)
    await journal.close()
    with sqlite3.connect(tmp_path / "j") as db:
        names = "pool_id, branch_pos, own_tokens, prefix_hash, fingerprint, source, created_ts, last_access_ts"
        db.execute(f"INSERT INTO pools ({names}) VALUES (1, 0, x'0102', 'h', 'm', 'tokens', 0, 0)")
    db.close()
    journal = Journal(tmp_path / "j")
    assert (await journal.open(5)).pools == ()
    assert journal.moved_aside == tmp_path / "j.corrupt-5"
    await journal.close()


def test_a_folder_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    """`--state-dir .` must not lock others out of a folder; the files of ours are private anyway."""
    tmp_path.chmod(0o755)
    (tmp_path / "notes.txt").touch()
    folder = StateFolder(tmp_path)
    folder.close()
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_does_not_keep_the_lock_from_being_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the holder is a courtesy; the journal says that the disk is full."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    StateFolder(tmp_path / "state").close()
