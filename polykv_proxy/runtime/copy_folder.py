"""The folder of copies: one file a pool, named by the pool's id.

Law: blocking, for threads. What is not named like a copy of ours, or is a folder, is nobody's business here and stays.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

_NAME = re.compile(r"([0-9]{1,18})\.kv(\.part)?")


class CopyFolder:
    """Files of KV in one folder. `path` is absolute: the engine opens the files too."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def file(self, pool_id: int) -> Path:
        """Where the copy of a pool is, or would be."""
        return self._path / f"{pool_id}.kv"

    def make(self) -> None:
        """Make the folder, private, where it is not there. OSError."""
        self._path.mkdir(mode=0o700, exist_ok=True)

    def tidy(self, known: Mapping[int, int]) -> list[int]:
        """Delete copies that no pool has, half-written and cut ones too; the pools of `known` whose copy is not there. OSError.

        Copies may be deleted meanwhile.
        """
        there = set()
        for entry in self._entries():
            named = _NAME.fullmatch(entry.name)
            if named is None or entry.is_dir(follow_symlinks=False):
                continue
            pool_id = int(named[1])
            if named[2] is None and known.get(pool_id) == _size(Path(entry.path)):
                there.add(pool_id)
            else:
                Path(entry.path).unlink(missing_ok=True)
        return [pool_id for pool_id in known if pool_id not in there]

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._path) as entries:
                return list(entries)
        except FileNotFoundError:
            return []

    def folder_in_place_of(self, pool_id: int) -> Path | None:
        """A folder of somebody's that stands where the copy of a pool would be written."""
        file = self.file(pool_id)
        places = (file, file.with_name(f"{file.name}.part"))
        return next((place for place in places if place.is_dir() and not place.is_symlink()), None)

    def size(self, pool_id: int) -> int | None:
        """Bytes of a copy; None when it is not there."""
        return _size(self.file(pool_id))

    def delete(self, pool_id: int) -> None:
        """Delete a copy; fine when it is not there. OSError."""
        if self.size(pool_id) is not None:
            self.file(pool_id).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Bytes that the disk has left. OSError."""
        return shutil.disk_usage(self._path).free


def _size(file: Path) -> int | None:
    try:
        found = file.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return None if stat.S_ISDIR(found.st_mode) else found.st_size
