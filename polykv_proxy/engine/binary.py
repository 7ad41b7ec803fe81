"""What kind of engine a file is: what it can listen on, what its command line wants, whether it carries a model.

Law: asks the binary itself (`--help`, bounded) and reads its archive directory; nothing is loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from polykv_proxy.errors import SettingsError

_HELP_S = 30
_NAMES = ("llamafile", "llama-server")


@dataclass(frozen=True, slots=True)
class EngineBinary:
    """An engine file. `unix_socket`: listens on a `--host` that ends in .sock. `llamafile_cli`: wants `--server --nobrowser`."""

    path: Path
    unix_socket: bool
    llamafile_cli: bool
    has_model: bool


def find_binary(given: Path | None) -> Path:
    """The engine to run: the one given, `./llamafile`, or one on PATH. SettingsError says what to write."""
    if given is not None:
        return _checked(given)
    if Path("llamafile").is_file():
        return _checked(Path("llamafile"))
    for name in _NAMES:
        found = shutil.which(name)
        if found:
            return Path(found)
    raise SettingsError("no engine: give one with --engine ./llamafile, or a running one with --engine-url http://127.0.0.1:PORT")


def inspect_binary(path: Path) -> EngineBinary:
    """Ask the file what it is. SettingsError when it cannot be run."""
    text = _help(path)
    return EngineBinary(path, ".sock" in text, "--nobrowser" in text, _carries_model(path))


def _checked(path: Path) -> Path:
    if not path.is_file():
        raise SettingsError(f"--engine {path}: no such file; build one with scripts/build_engine.sh")
    if not os.access(path, os.X_OK):
        raise SettingsError(f"--engine {path}: not executable; run: chmod +x {path}")
    return path.absolute()


def _help(path: Path) -> str:
    for command in ([str(path), "--help"], ["/bin/sh", str(path), "--help"]):
        try:
            done = subprocess.run(  # noqa: S603 - the user's own engine
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_HELP_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            return (error.stdout or b"").decode("utf-8", "replace")
        except OSError:
            continue
        return done.stdout.decode("utf-8", "replace")
    raise SettingsError(f"--engine {path}: cannot be run on this machine; is it built for this system?")


def _carries_model(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name == ".args" or name.endswith(".gguf") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False
