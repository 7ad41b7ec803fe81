"""Mirrors runtime/copy_folder.py."""

from pathlib import Path

import pytest

from polykv_proxy.runtime.copy_folder import CopyFolder


def test_tidying_leaves_what_is_known_and_what_is_not_ours(tmp_path: Path) -> None:
    """Strays, halves and files of another size go; foreign names, folders and links' targets stay."""
    folder = CopyFolder(tmp_path)
    target = tmp_path / "target"
    target.write_bytes(b"keep")
    for name, size in (("1.kv", 5), ("2.kv", 5), ("3.kv", 6), ("4.kv.part", 1), ("x.kv", 1), ("5.kv.bak", 1)):
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "6.kv").symlink_to(target)
    (tmp_path / "7.kv").mkdir()
    assert folder.tidy({1: 5, 3: 5, 6: 4, 8: 1}) == [3, 6, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.kv", "5.kv.bak", "7.kv", "target", "x.kv"]
    assert target.read_bytes() == b"keep"


def test_copies_that_are_deleted_while_it_tidies_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was seen and is not there any more is no failure, known or not."""
    folder = CopyFolder(tmp_path)
    for n in (1, 2, 3):
        folder.file(n).write_bytes(b"x" * 5)
    seen = folder._entries()
    monkeypatch.setattr(folder, "_entries", lambda: seen)
    folder.delete(1)
    folder.delete(3)
    assert folder.tidy({1: 5, 2: 5}) == [1]


def test_a_folder_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    """Sizes, deletions and tidying are fine; made, it is private."""
    folder = CopyFolder(tmp_path / "kv")
    assert (folder.tidy({1: 5}), folder.size(1)) == ([1], None)
    folder.delete(1)
    folder.make()
    folder.make()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert folder.free_bytes() > 0


def test_a_folder_with_the_name_of_a_copy_is_none(tmp_path: Path) -> None:
    """It is seen, counts for nothing, and is never deleted; a link to one is a stray of ours."""
    folder = CopyFolder(tmp_path)
    (tmp_path / "1.kv").mkdir()
    (tmp_path / "2.kv.part").mkdir()
    (tmp_path / "3.kv").symlink_to(tmp_path)
    assert [folder.folder_in_place_of(n) for n in (1, 2, 3, 4)] == [tmp_path / "1.kv", tmp_path / "2.kv.part", None, None]
    assert folder.size(1) is None
    folder.delete(1)
    assert (tmp_path / "1.kv").is_dir()
