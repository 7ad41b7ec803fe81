"""Models for tests and benches, fetched or made at first use and kept in the cache folder.

Law: every function returns the path of a whole file; nothing here starts an engine.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.models import puppet, tiny

ROOT = Path(__file__).resolve().parents[2]


def cache_dir() -> Path:
    """Where models are kept; the same folder as in `scripts/fetch_models.sh`."""
    base = os.environ.get("POLYKV_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polykv"
    return Path(base) / "models"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: llama architecture, plain attention."""
    return fetched("smollm2")


def gemma3() -> Path:
    """Gemma-3-270M, Q4_K_M: sliding-window attention."""
    return fetched("gemma3")


def tiny_model(kind: str) -> Path:
    """A tiny model with random weights; the kinds are the keys of `tiny.KINDS`."""
    donor = smollm2()
    return _kept(f"tiny-{kind}", tiny.file_name(kind, donor.name), lambda target: tiny.build(kind, target, donor))


def puppet_model() -> Path:
    """A model that says what its chat template chose, tool calls above all."""
    donor = smollm2()
    return _kept("puppet", puppet.file_name(donor.name), lambda target: puppet.build(target, donor))


def _kept(stem: str, name: str, build: Callable[[Path], Path]) -> Path:
    target = cache_dir() / name
    if target.exists():
        return target
    with (cache_dir() / ".lock-tiny").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for old in cache_dir().glob(f"{stem}-{'?' * 12}.gguf"):  # of an earlier generator
                old.unlink()
            build(target)
    return target


def fetched(name: str) -> Path:
    """Run the fetch script; RuntimeError with what it said when it fails."""
    command: list[str | Path] = [ROOT / "scripts" / "fetch_models.sh", "--only", name]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"scripts/fetch_models.sh --only {name} failed:\n{done.stderr}")
    return Path(done.stdout.splitlines()[-1])
