"""Mirrors runtime/copy_folder.py."""

from pathlib import Path

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


def test_a_folder_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    """Sizes, deletions and tidying are fine; made, it is private."""
    folder = CopyFolder(tmp_path / "kv")
    assert (folder.tidy({1: 5}), folder.size(1)) == ([1], None)
    folder.delete(1)
    folder.make()
    folder.make()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert folder.free_bytes() > 0
