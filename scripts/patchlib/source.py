"""The pristine engine source and git, both kept away from the checkout around them.

Law: the archive in the cache is only read; every git command runs without the user's configuration.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

from scripts.patchlib.series import SeriesError

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "/vendor/llama.cpp/"
QUIET = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
IDENTITY = ("-c", "user.name=polykv", "-c", "user.email=polykv@localhost", "-c", "core.autocrlf=false")


def cache() -> Path:
    """The cache folder; the same as in scripts/build_engine.sh."""
    base = os.environ.get("POLYKV_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polykv"
    return Path(base)


def archive() -> Path:
    """The archive of the engine's source, fetched if need be."""
    command: list[str | Path] = [ROOT / "scripts" / "build_engine.sh", "--fetch"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SeriesError("the engine source is not there; see the message above")
    return Path(done.stdout.strip())


def unpack(target: Path, only: Iterable[str] | None = None) -> None:
    """Unpack the pristine tree, or the files named, into `target`."""
    wanted = None if only is None else set(only)
    with tarfile.open(archive()) as tar:
        for member in tar:
            path = member.name.partition(PREFIX)[2]
            if path in ("", ".git") or not member.isfile() or (wanted is not None and path not in wanted):
                continue
            source = tar.extractfile(member) or io.BytesIO()
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(source.read())
            (target / path).chmod(member.mode & 0o755)
            if wanted is not None:
                wanted.discard(path)
                if not wanted:
                    return
    if wanted:
        raise SeriesError(f"the engine source holds no {', '.join(sorted(wanted))}")


def git(folder: Path, *arguments: str, stdin: str | None = None, ok: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`, whatever repository lies around it; SeriesError with its words when it fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= QUIET | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "-C", str(folder), *IDENTITY, *arguments]
    done = subprocess.run(command, input=stdin or "", env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in ok:
        raise SeriesError(f"git {' '.join(arguments)} in {folder}:\n{done.stderr.strip() or done.stdout.strip()}")
    return done
