"""Files of keys, as llama-server reads them: one key a line, lines that begin with `#` are comments.

Law: a key never gets into a message.
"""

from __future__ import annotations

import stat
from pathlib import Path

from polykv_proxy.errors import SettingsError
from polykv_proxy.settings import KEY_RULE, is_key


def read_keys(path: Path, where: str) -> tuple[str, ...]:
    """The keys of a file, at least one. SettingsError names the file and the line."""
    try:
        lines = path.read_text("ascii").splitlines()
    except OSError as error:
        raise SettingsError(f"{where} {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsError(f"{where} {path}: {KEY_RULE}, one a line") from None
    found = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = [(number, key) for number, key in found if key and not key.startswith("#")]
    for number, key in keys:
        if not is_key(key):
            raise SettingsError(f"{where} {path}, line {number}: {KEY_RULE}")
    if not keys:
        raise SettingsError(f"{where} {path}: there is no key in it; leave the option out to have none")
    return tuple(key for _, key in keys)


def read_key(path: Path, where: str) -> str:
    """The one key of a file. SettingsError."""
    keys = read_keys(path, where)
    if len(keys) > 1:
        raise SettingsError(f"{where} {path}: {len(keys)} keys, one is wanted")
    return keys[0]


def readable_by_others(path: Path) -> bool:
    """May other users of this machine read the file?"""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
