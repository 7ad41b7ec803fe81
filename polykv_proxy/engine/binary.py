"""What kind of engine a file is: what it can listen on, what its command line wants, whether it carries a model.

Law: asks the binary itself (`--help`, bounded) and reads its archive directory; nothing is loaded.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from polykv_proxy.errors import SettingsError

_HELP_S = 30
_HELP_BYTES = 4 * 1024 * 1024
_NAMES = ("llamafile", "llama-server")
_BUILD = "build one with polykv-proxy build-engine, or scripts/build_engine.sh in a checkout"


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
    raise SettingsError(
        f"no engine: there is no ./llamafile, and none on PATH; {_BUILD}, or give one with --engine FILE, or a running one with "
        "--engine-url http://127.0.0.1:PORT"
    )


def inspect_binary(path: Path) -> EngineBinary:
    """Ask the file what it is. SettingsError when it cannot be run."""
    text = _help(path)
    return EngineBinary(path, ".sock" in text, "--nobrowser" in text, _carries_model(path))


def _checked(path: Path) -> Path:
    if not path.is_file():
        raise SettingsError(f"--engine {path}: no such file; {_BUILD}")
    if not os.access(path, os.X_OK):
        raise SettingsError(f"--engine {path}: not executable; run: chmod +x {path}")
    return path.absolute()


def _help(path: Path) -> str:
    for command in ([str(path), "--help"], ["/bin/sh", str(path), "--help"]):
        try:
            return _said(command).decode("utf-8", "replace")
        except OSError:
            continue
    raise SettingsError(f"--engine {path}: cannot be run on this machine; is it built for this system?")


def _said(command: list[str]) -> bytes:
    """What a command prints, up to its end, `_HELP_S` or `_HELP_BYTES`; nothing of it is left running. OSError: it cannot run."""
    with subprocess.Popen(  # noqa: S603 - the user's own engine
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as child:
        try:
            assert child.stdout is not None
            return _read(child.stdout.fileno(), time.monotonic() + _HELP_S)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)


def _read(fd: int, end: float) -> bytes:
    said = bytearray()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while len(said) < _HELP_BYTES and (left := end - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            data = os.read(fd, 65536)
            if not data:
                break
            said += data
    return bytes(said)


def _carries_model(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name == ".args" or name.endswith(".gguf") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False
