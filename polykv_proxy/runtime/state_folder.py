"""The folder that holds a proxy's journal and copies of KV, and the lock that keeps it to one proxy.

Law: a folder that holds nothing else is 0700, and so is every folder made above it, whatever the umask; any other keeps its mode.
Files are 0600. The lock lives as long as the process, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from polykv_proxy.errors import SettingsError

_JOURNAL = "journal.sqlite"
_COPIES = "kv"


class StateFolder:
    """A state folder held by this process. SettingsError when it cannot be used or another proxy holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        try:
            _make(path)
            if all(file.name in {"lock", _COPIES} or file.name.startswith(_JOURNAL) for file in path.iterdir()):
                path.chmod(0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsError(f"state folder {path} cannot be used: {error.strerror}; choose another with --state-dir") from error
        self._take(self._lock)

    @property
    def journal_path(self) -> Path:
        """Where the journal is."""
        return self.path / _JOURNAL

    @property
    def copies_path(self) -> Path:
        """Where copies of KV are, for every process."""
        return self.path.absolute() / _COPIES

    def _take(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(lock, 32).decode("ascii", "replace").strip() or "unknown"
            self.close()
            raise SettingsError(
                f"state folder {self.path} is in use by another polykv-proxy (pid {holder}); stop it or choose another --state-dir"
            ) from error
        with contextlib.suppress(OSError):  # a full disk: the number only helps whoever finds the folder taken
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make(path: Path) -> None:
    """The folder and those above it, each private: where others may write a parent they can put a folder of theirs in its place."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
