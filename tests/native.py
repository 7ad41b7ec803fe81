"""Small C++ of ours, compiled for a test and kept in the cache folder by its content.

Law: no engine and no model is needed. A sanitizer is part of the content; what a compiler says is part of the failure.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.models import cache_dir

ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / "patches" / "src" / "tools" / "server"
COMMON = ROOT / "patches" / "src" / "common"
CPP = ROOT / "tests" / "cpp"
SANITIZERS = {"none": "", "thread": "thread", "address": "address,undefined"}
HANG_GUARD_S = 250


def shared_object(name: str, sources: Sequence[Path]) -> Path:
    """For `ctypes`."""
    return _compiled(f"{name}.so", sources, ["-O1", "-shared", "-fPIC"])


def program(name: str, sources: Sequence[Path], sanitizer: str = "none") -> Path:
    """A driver, with one of `SANITIZERS`."""
    flags = ["-O1", "-g"]
    if sanitizer != "none":
        flags += [f"-fsanitize={SANITIZERS[sanitizer]}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    return _compiled(name, sources, flags)


def _compiled(name: str, sources: Sequence[Path], flags: list[str]) -> Path:
    compiler = os.environ.get("CXX") or "c++"
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", *flags, f"-I{OURS}", f"-I{COMMON}"]
    key = hashlib.sha256(" ".join(command).encode() + _output([compiler, "--version"]).encode())
    for file in sorted({*sources, *OURS.glob("gpu-share-*"), *COMMON.glob("gpu-share-*")}):
        key.update(file.read_bytes())
    target = cache_dir().parent / "objects" / f"{key.hexdigest()[:20]}-{name}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f"{target.name}.{os.getpid()}")
        _output([*command, *map(str, sources), "-o", str(new)])
        new.replace(target)
    return target


def _output(command: list[str]) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=HANG_GUARD_S,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[:6000]}"
    return done.stdout
